"""The attention patterns of autoregressive heads: in unrolled training, and in drafting.

Legend: B batch, T rows, S keys, N heads, C head size, t rows of a chunk, n new rows.
"""

from __future__ import annotations

from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spechead.target.attention import grouped_attention
from spechead.target.cache import KVBuffer

_WEIGHTS_AT_ONCE = 1 << 24  # attention weights of a layer and step over all heads, 64 MB in float32


class UnrolledAttention:
    """The attention pattern of training; one object for each decoder layer.

    Step 0 is causal; in step s, row t sees the true rows up to t, then its own drafts.

        keys       step 0: rows 0..t       steps 1..s: row t only       (s = 2, row 2)
                   k0 k1 k2 .  .  .        k2'  k2''

    These are the keys of a real draft of depth s + 1 that starts at row t: committed rows from true features, then the
    chain of its own drafts. Queries and keys of step s are rotated by position + s.

    Later steps compute attention without a fused kernel, since none gives each row keys of its own. If a layer has many
    weights, they are computed for a chunk of rows at a time and recomputed in backward, so that memory grows with T and
    not with its square.
    """

    def __init__(self, document: Tensor) -> None:  # [B, T]
        same = (document[:, :, None] == document[:, None, :]) & (document[:, :, None] >= 0)
        allowed = same.tril() | torch.eye(document.shape[1], dtype=torch.bool, device=document.device)
        self._blocked = ~allowed[:, None]  # [B, 1, T, T]; padding sees itself, so that no row is empty
        self._keys: list[Tensor] = []  # each [B, N, T, C]
        self._values: list[Tensor] = []

    def fork(self) -> UnrolledAttention:
        """A copy with the same steps so far, which later steps do not share."""
        fork = copy(self)
        fork._keys, fork._values = self._keys.copy(), self._values.copy()
        return fork

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        if len(self._keys) == 1:
            return F.scaled_dot_product_attention(query, self._keys[0], self._values[0], attn_mask=~self._blocked)
        batch, heads, width = query.shape[:3]
        rows = max(1, _WEIGHTS_AT_ONCE // (batch * heads * width))
        if rows >= width:
            return self._attend(query, 0)
        parts = query.split(rows, 2)
        recomputed = partial(checkpoint, self._attend, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([recomputed(part, i * rows, len(self._keys)) for i, part in enumerate(parts)], 2)

    def _attend(self, query: Tensor, first: int, steps: int | None = None) -> Tensor:
        """Attention of a chunk of rows that begins with row `first`: query [B, N, t, C] -> [B, N, t, C].

        `steps`: the number of steps to attend to, since more may be stored when backward calls this again.
        """
        rows = slice(first, first + query.shape[2])
        seen = slice(0, rows.stop)  # later true rows are hidden from all rows of the chunk
        scale = query.shape[-1] ** -0.5
        true = query @ self._keys[0][:, :, seen].transpose(2, 3) * scale  # [B, N, t, S]
        true = true.masked_fill(self._blocked[:, :, rows, seen], float("-inf"))
        own = [(query * k[:, :, rows]).sum(-1, keepdim=True) * scale for k in self._keys[1:steps]]  # each [B, N, t, 1]
        weights = torch.cat([true, *own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        width = seen.stop
        out = weights[..., :width] @ self._values[0][:, :, seen]  # [B, N, t, C]
        for i, v in enumerate(self._values[1:steps]):
            out = out + weights[..., width + i : width + i + 1] * v[:, :, rows]
        return out


class CachedAttention:
    """The attention pattern of drafting: new rows are appended to the cache `rows` and see what `visible` allows.

    `visible`: bool [n, S+n]; None if the cache is empty and the new rows are causal.
    """

    def __init__(self, rows: KVBuffer, visible: Tensor | None) -> None:
        self._rows, self._visible = rows, visible

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._rows.append(key, value)
        if self._visible is None:
            return grouped_attention(query, keys, values, None, causal=True)
        return grouped_attention(query, keys, values, self._visible[None, None])


def causal_after(past: int, new: int, device: torch.device) -> Tensor | None:
    """The causal mask of `new` rows after `past` others, bool [n, S+n].

    None, for causal attention without a mask, if there are no others: a prompt's mask would be large.
    """
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past) if past else None
