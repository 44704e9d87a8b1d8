"""Medusa: independent stacks, which start by repeating the target."""

from __future__ import annotations

import torch

from spechead.heads.medusa import Medusa
from spechead.target.model import Target
from tests.helpers.heads import make_head, sample


def test_medusa_blocks_share_nothing(target: Target) -> None:
    head = make_head("medusa", target, n_layers=3)
    storage = [p.data_ptr() for p in head.parameters()]
    assert len(set(storage)) == len(storage) == 4 * (3 * 2 + 1)


def test_a_fresh_medusa_head_repeats_the_targets_next_token(target: Target) -> None:
    for output in ("own", "shared"):
        head = make_head("medusa", target, output=output, draft_vocab_size=0)
        assert isinstance(head, Medusa)
        out = target.forward(sample(target).ids[None])
        for k in range(4):
            assert torch.allclose(head.head_logits(out.hidden, k), target.logits(out.hidden), atol=1e-5)
