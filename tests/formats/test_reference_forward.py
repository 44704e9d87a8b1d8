"""The second implementation of drafting computes what the heads compute."""

from __future__ import annotations

import pytest
import torch

from spechead.formats.check import drafted
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.reference_forward import log_probabilities
from tests.helpers.exporting import make_head, tiny


@pytest.mark.parametrize(
    "name", ["eagle3-layers", "eagle3-1", "eagle3-scaled", "eagle-layers", "medusa-shared-reduced"]
)
def test_drafts_are_the_heads(name: str) -> None:
    target, head = tiny("llama"), make_head(name, tiny("llama"))
    foreign = ForeignHead(head.kind, vars(head.config), head.state_dict())
    text = torch.randint(target.vocab_size, (7,), generator=torch.Generator().manual_seed(2))
    drafts, expected = drafted(head, target, text, 3)
    assert len(drafts) == (2 if head.kind == "medusa" else 3)
    found = log_probabilities(foreign, target, text.tolist(), drafts)
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert torch.allclose(found.exp(), expected.exp(), atol=1e-5)
