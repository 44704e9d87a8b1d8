"""Rotary positions as a target's config describes them, for heads that take them over."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spechead.errors import UserError


def rope_theta(config: Any) -> float:
    """The base of the rotary positions (of the full-attention layers, where there are two kinds)."""
    return float(_parameters(config).get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def rope_scaling(config: Any) -> dict[str, Any]:
    """The scaling of the rotary positions by transformers' names; empty without one.

    The factors of single dimensions (longrope) of a target that rotates only some of them fit no others and are left
    out.
    """
    rope = _parameters(config)
    kind = rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0
    if kind in ("default", "proportional") or (kind == "longrope" and partial):
        return {}
    return {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor", "type")}


def rotary_frequencies(config: Any, size: int, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Inverse frequencies [size/2], float32, and the factor on cosine and sine, of a scaling with base `theta`.

    For positions within the original length: the changes of dynamic scalings and longrope beyond it are not applied.
    Raises UserError where transformers has no such scaling, or it does not fit attention heads of `size`.
    """
    config = copy.deepcopy(config)
    config.head_dim = size
    config.rope_parameters = {**scaling, "rope_theta": theta, "partial_rotary_factor": 1.0}
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if scaling.get("rope_type") not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(ROPE_INIT_FUNCTIONS)
            raise UserError(
                f"option head.options.rope_scaling: needs a rope_type, one of {known}, got {scaling}"
            ) from error
        raise UserError(
            f"option head.options.rope_scaling: {scaling} does not fit heads of size {size} ({type(error).__name__}: "
            f"{error}); give head.options.rope_theta for positions without scaling"
        ) from error
    return frequencies.float(), float(factor)


def _parameters(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))
