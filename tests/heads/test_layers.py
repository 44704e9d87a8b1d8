"""Rotary positions by hand."""

from __future__ import annotations

import torch

from spechead.heads.layers import Rotary, rotary


def test_rotating_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, None, None]  # the pairs are (1, 3) and (2, 4)
    cos, sin = Rotary(torch.tensor([0.0, torch.pi / 2]))(torch.tensor([[1]]))
    assert torch.allclose(rotary(x, cos, sin)[0, 0, 0], torch.tensor([1.0, -4.0, 3.0, 2.0]), atol=1e-6)
    cos, sin = Rotary(torch.tensor([0.0, torch.pi / 2]), 2.0)(torch.tensor([[1]]))
    assert torch.allclose(rotary(x, cos, sin)[0, 0, 0], torch.tensor([2.0, -8.0, 6.0, 4.0]), atol=1e-6)
