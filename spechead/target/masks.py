"""The 4-D attention masks of a target: trees, batches of unequal length, sliding windows.

Legend: B batch, T new tokens, S tokens in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


def refuse_unknown_layers(config: Any, name: str) -> None:
    """Raise UserError for layers that are neither of full nor of sliding attention, such as recurrent ones."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    if unknown:
        raise UserError(
            f"target {name!r} ({config.model_type}) has layers of type {', '.join(sorted(unknown))}; "
            "only full and sliding attention can be verified in a tree"
        )


def attention_masks(
    config: Any,
    dtype: torch.dtype,
    past: int,
    lengths: list[int] | None,
    positions: Tensor,  # [B, T]
    visible: Tensor | None,  # bool [B, T, T]; None: causal
    *,
    optional: bool,
    by_type: bool,
) -> Any:
    """Additive masks [B, 1, T, S+T]: each new token sees the cached tokens of its row and its `visible` new tokens, in
    sliding layers only those inside the window.

    `lengths`: cached tokens of each row; None where all have `past`. `optional`: the attention function needs no mask
    for one new token or a causal prefill; None is returned for these while the window is out of reach. `by_type`: a
    dict with a mask for each of the config's layer types, which some families expect.
    """
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    by_type = by_type and bool(types)
    batch, new = positions.shape
    in_reach = window is not None and past + new > window  # positions are below past + new
    plain = optional and visible is None and lengths is None and (past == 0 or new == 1)
    if plain and not in_reach:
        return dict.fromkeys(types) if by_type else None
    columns = torch.arange(past, device=positions.device)  # [S]; a token's column is its position
    allowed = _allowed(columns, lengths, visible, batch, new)  # [B, T, S+T]
    full = None if plain else _additive(allowed, dtype)
    sliding = full
    types = types or ({FULL} if window is None else {SLIDING})
    if window is not None and in_reach and SLIDING in types:
        keys = torch.cat([columns.expand(batch, past), positions], -1)  # [B, S+T]
        inside = positions[:, :, None] - keys[:, None, :] < window  # [B, T, S+T]
        sliding = _additive(allowed & inside, dtype)
    if by_type:
        return {kind: sliding if kind == SLIDING else full for kind in types}
    return sliding if SLIDING in types else full


def _allowed(columns: Tensor, lengths: list[int] | None, visible: Tensor | None, batch: int, new: int) -> Tensor:
    """bool [B, T, S+T]: the tokens that each new token may attend to, without a window."""
    past, device = columns.shape[0], columns.device
    if visible is None:
        visible = torch.ones(new, new, dtype=torch.bool, device=device).tril()[None]
    limits: Tensor | int = past
    if lengths is not None:
        limits = torch.tensor(lengths, device=device)[:, None, None]  # [B, 1, 1]
    return torch.cat([(columns < limits).expand(batch, new, past), visible.expand(batch, new, new)], -1)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:  # bool [B, T, S+T] -> [B, 1, T, S+T]
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
