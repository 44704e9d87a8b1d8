"""The building blocks of heads: norm, rotary positions, gated MLP, and attention with a pattern given by the caller.

Legend: B batch, T rows, S keys, N query heads, G key/value heads, C head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(query [B, N, T, C], key [B, G, T, C], value [B, G, T, C]) -> [B, N, T, C]; may cache keys and values."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Rotary:
    """Rotary positions (arXiv 2104.09864) with given inverse frequencies [C/2].

    Not a module buffer, so that the frequencies stay float32 when a head is cast. `factor` multiplies cosine and sine,
    as YaRN requires (arXiv 2309.00071).
    """

    def __init__(self, frequencies: Tensor, factor: float = 1.0) -> None:
        self._frequencies, self._factor = frequencies, factor

    @classmethod
    def plain(cls, size: int, theta: float) -> Rotary:
        """Frequencies theta^(-2i/C) for heads of `size` C, without scaling."""
        return cls(theta ** -(torch.arange(size // 2, dtype=torch.float32) / (size // 2)))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, 1, T, C/2], float32, of the angles at positions [B, T]."""
        self._frequencies = self._frequencies.to(positions.device)
        angle = positions[:, None, :, None].float() * self._frequencies
        return angle.cos() * self._factor, angle.sin() * self._factor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, T, C] by its position (halves layout), in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `attend` sets which rows see which."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        positions: Rotary,
        bias: bool = False,  # on queries, keys and values
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.head_dim, self.rotation = head_dim, positions

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # [B, T, inputs] -> [B, T, H]
        query, key, value = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = self.rotation(positions)
        out = attend(rotary(query, cos, sin), rotary(key, cos, sin), value)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:  # [B, T, heads*C] -> [B, heads, T, C]
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer: attention and a gated MLP, each added to the hidden state."""

    def __init__(self, attention: Attention, mlp: GatedMLP, hidden: int, eps: float, first_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps) if first_norm else nn.Identity()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # [B, T, H]
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
