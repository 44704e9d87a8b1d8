"""Taps record the hidden states of one forward and leave no hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spechead.target.taps import Taps


class Add(nn.Module):
    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor]:
        return (hidden_states + 1,) if self.as_tuple else hidden_states + 1


@pytest.mark.parametrize("as_tuple", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_taps_are_hidden_states_by_index(as_tuple: bool, by_name: bool) -> None:
    blocks = nn.ModuleList([Add(as_tuple) for _ in range(3)])
    tapped = Taps(blocks, (2, 0, 3, 1))
    with tapped:
        x = torch.zeros(1, 2, 1)
        for block in blocks:
            x = block(hidden_states=x) if by_name else block(x)
            x = x[0] if as_tuple else x
    assert tapped.features(torch.full((1, 2, 1), 9.0))[0, 0].tolist() == [2, 0, 9, 1], "the last is the final state"
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_no_taps_are_no_features() -> None:
    assert Taps(nn.ModuleList([Add(False)]), ()).features(torch.zeros(2, 3, 5)).shape == (2, 3, 0)
