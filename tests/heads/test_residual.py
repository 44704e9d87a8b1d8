"""The blocks and output layers that Medusa and Hydra share."""

from __future__ import annotations

import pytest
import torch

from spechead.heads.residual import Block, ResidualHead
from spechead.target.model import Target
from tests.helpers.heads import make_head


@pytest.mark.parametrize("inputs", [6, 4])
def test_a_block_starts_as_the_first_of_its_inputs(inputs: int) -> None:
    block, x = Block(inputs, 4), torch.randn(3, inputs)
    assert torch.allclose(block(x), x[:, :4])
    assert ("residual.weight" in block.state_dict()) is (inputs > 4)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_output_layers_are_the_targets_rows(kind: str, target: Target) -> None:
    head, shared = (make_head(kind, target, n_heads=2, output=output) for output in ("own", "shared"))
    assert isinstance(head, ResidualHead) and isinstance(shared, ResidualHead)
    state = torch.randn(3, target.hidden_size)
    assert len(head.lm_heads) == 2 and len(shared.lm_heads) == 0
    assert torch.allclose(head.output(state, 1), shared.output(state, 1), atol=1e-5)
