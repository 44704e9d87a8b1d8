"""Linear layers whose weights are reordered once for the CPU's matrix units (oneDNN).

On a CPU a stock linear layer reorders its weight in every call; with the weight packed once, a forward of a few tokens
costs little more than one of a single token, so that verifying a small tree is nearly free. Plain decoding gains as
much. Inference only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS_HINT = 16  # rows per call for which oneDNN chooses the layout: measured best for 1 to 10 rows


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing works here: a CPU with oneDNN, float32 or bfloat16."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear(nn.Module):
    """x -> x W^T + b with W packed; keeps no reference to the unpacked weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()  # [out, in]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.clone(), _ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> None:
    """Replace every plain nn.Linear under `module` by a `PackedLinear`, in place."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and can_pack(child.weight.device, child.weight.dtype):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
