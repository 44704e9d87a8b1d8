"""The shape of a decoder layer as options of a head, and its initialisation from the target's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor, nn

from spechead.errors import UserError
from spechead.heads.base import Role, same_hidden_size
from spechead.heads.layers import Attention, DecoderLayer, GatedMLP, Rotary
from spechead.options import Range
from spechead.target import rotary
from spechead.target.model import Target

_SCALE = 0.01  # of the copied output projections: the target's hidden states are far larger than normed ones


@dataclass
class DecoderShape:
    """Shape of a decoder layer; values of 0 are taken from the target when the head is built."""

    hidden_size: Annotated[int, Range(0), Role.SIZE] = 0
    intermediate_size: Annotated[int, Range(0), Role.SIZE] = 0
    num_attention_heads: Annotated[int, Range(0), Role.SIZE] = 0
    num_key_value_heads: Annotated[int, Range(0), Role.SIZE] = 0
    head_dim: Annotated[int, Range(0), Role.SIZE, Role.MEANING] = 0
    rms_norm_eps: Annotated[float, Range(0), Role.SIZE] = 0.0
    rope_theta: Annotated[float, Range(0), Role.SIZE, Role.MEANING] = 0.0
    """Base of the rotary positions; 0: the target's, along with its scaling unless one is given."""
    rope_scaling: Annotated[dict[str, Any], Role.MEANING] = field(default_factory=dict)
    """Scaling of the rotary positions as transformers writes it, such as {rope_type: linear, factor: 2}; with a
    `rope_theta` of its own, empty means none."""

    def fill(self, target: Target) -> None:
        """Replace values of 0 by the target's. Raises UserError if the hidden sizes differ."""
        t = target.config
        self.hidden_size = same_hidden_size(self.hidden_size, target)
        self.intermediate_size = self.intermediate_size or max(getattr(t, "intermediate_size", 0), self.hidden_size)
        self.num_attention_heads = self.num_attention_heads or t.num_attention_heads
        self.num_key_value_heads = (
            self.num_key_value_heads or getattr(t, "num_key_value_heads", 0) or self.num_attention_heads
        )
        self.head_dim = self.head_dim or getattr(t, "head_dim", None) or self.hidden_size // self.num_attention_heads
        self.rms_norm_eps = self.rms_norm_eps or getattr(t, "rms_norm_eps", 1e-5)
        if not self.rope_theta:
            self.rope_theta = rotary.rope_theta(target.config)
            self.rope_scaling = self.rope_scaling or rotary.rope_scaling(target.config)

    def attention(self, target: Target, inputs: int, bias: bool = False) -> Attention:
        """Attention over `inputs` features. Raises UserError for heads, sizes or scalings that cannot work."""
        self._refuse_unbuildable()
        positions = Rotary.plain(self.head_dim, self.rope_theta)
        if self.rope_scaling:
            positions = Rotary(
                *rotary.rotary_frequencies(target.config, self.head_dim, self.rope_theta, self.rope_scaling)
            )
        heads = self.num_attention_heads, self.num_key_value_heads
        return Attention(inputs, self.hidden_size, *heads, self.head_dim, positions, bias)

    def _refuse_unbuildable(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"option head.options.num_attention_heads: {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(
                "option head.options.head_dim: must be even and above 0, since rotary positions turn pairs, got "
                f"{self.head_dim} (by default the target's, or hidden_size / num_attention_heads)"
            )
        for name, value in self.rope_scaling.items():
            numbers = value if isinstance(value, list) else [value]
            if name.endswith("factor") and value is not None and not all(map(_above_zero, numbers)):
                raise UserError(f"option head.options.rope_scaling: {name} must be above 0, got {value}")

    def decoder_layer(self, target: Target, *, first_norm: bool = True, bias: bool = False) -> DecoderLayer:
        """A pre-norm decoder layer of this shape."""
        attention = self.attention(target, self.hidden_size, bias)
        mlp = GatedMLP(self.hidden_size, self.intermediate_size)
        return DecoderLayer(attention, mlp, self.hidden_size, self.rms_norm_eps, first_norm)


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def copy_if_same_shape(weight: Tensor, source: Tensor | None) -> None:
    """Overwrite `weight` with the target's, if it has one of that shape."""
    if source is not None and source.shape == weight.shape:
        weight.copy_(source)


def start_near_identity(layer: nn.Module, target: Target) -> None:
    """Copy the target's last layer where shapes allow, with output projections scaled down."""
    weights = dict(target.last_block.named_parameters())
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            source = target.norm_weight(getattr(target.last_block, name.removesuffix(".weight"), None))
        else:
            source = weights.get(name)
        copy_if_same_shape(parameter, source)
    layer.get_parameter("self_attn.o_proj.weight").mul_(_SCALE)
    layer.get_parameter("mlp.down_proj.weight").mul_(_SCALE)
