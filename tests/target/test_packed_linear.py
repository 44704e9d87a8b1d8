"""Packed layers compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spechead.target.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="torch without oneDNN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(24, 40, bias).to(dtype)
    packed = PackedLinear(linear)
    for shape in ((24,), (1, 24), (3, 5, 24)):
        x = torch.randn(shape, dtype=dtype)
        assert torch.allclose(packed(x).float(), linear(x).float(), atol=1e-5 if dtype == torch.float32 else 0.05)


def test_only_plain_linear_layers_are_replaced() -> None:
    class Other(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), Other(4, 4))
    x = torch.randn(2, 4)
    expected = module(x)
    for _ in range(2):  # a second time there is nothing left to replace
        pack_linears(module)
    assert sum(isinstance(part, PackedLinear) for part in module.modules()) == 2
    assert torch.allclose(module(x), expected, atol=1e-6) and isinstance(module[2], Other)


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.device("cpu"), torch.float16) and not can_pack(torch.device("meta"), torch.float32)
