"""Who attends to whom: in unrolled training, and in drafting.

Legend: B batch, T rows, S keys, N heads, G key/value heads, C head size, n new rows.
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

_WEIGHTS_AT_ONCE = 1 << 24  # attention weights of a layer and step, over all heads: 64 MB in float32


class UnrolledAttention:
    """The attention pattern of training; one object for each decoder layer.

    Step 0 is causal; in step s row t sees the true rows up to t, then its own drafts.

        keys       step 0: rows 0..t       steps 1..s: row t only       (s = 2, row 2)
                   k0 k1 k2 .  .  .        k2'  k2''

    These are the keys of a real draft of depth s + 1 started behind row t: committed rows from true features, then the
    chain of its own guesses. Queries and keys of step s are rotated by position + s.

    Steps behind the first weigh keys one by one, since no kernel gives each row keys of its own. Where a layer's
    weights are many, they are made for a few rows at a time and once more in backward, so that memory grows with T and
    not with its square.
    """

    def __init__(self, document: Tensor) -> None:  # [B, T]
        same = (document[:, :, None] == document[:, None, :]) & (document[:, :, None] >= 0)
        allowed = same.tril() | torch.eye(document.shape[1], dtype=torch.bool, device=document.device)
        self._blocked = ~allowed[:, None]  # [B, 1, T, T]; padding sees itself, so that no row is empty
        self._keys: list[Tensor] = []  # each [B, N, T, C]
        self._values: list[Tensor] = []

    def fork(self) -> UnrolledAttention:
        """The same steps so far, and those to come apart."""
        other = copy(self)
        other._keys, other._values = self._keys.copy(), self._values.copy()
        return other

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        if len(self._keys) == 1:
            return F.scaled_dot_product_attention(query, self._keys[0], self._values[0], attn_mask=~self._blocked)
        batch, heads, width = query.shape[:3]
        rows = max(1, _WEIGHTS_AT_ONCE // (batch * heads * width))
        if rows >= width:
            return self._weigh(query, 0)
        parts = query.split(rows, 2)
        twice = partial(checkpoint, self._weigh, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([twice(part, i * rows, len(self._keys)) for i, part in enumerate(parts)], 2)

    def _weigh(self, query: Tensor, first: int, steps: int | None = None) -> Tensor:
        """What the rows from `first` on see in this step: query [B, N, t, C] -> [B, N, t, C].

        `steps`: how many steps that is; more may have been stored by the time that backward asks again.
        """
        rows = slice(first, first + query.shape[2])
        seen = slice(0, rows.stop)  # true rows behind are hidden from all of them
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
    """The attention pattern of drafting: new rows behind those in `rows`, of which they see what `visible` allows.

    `visible` bool [n, S+n]; None where `rows` is empty: the new rows are causal.
    """

    def __init__(self, rows: KVBuffer, visible: Tensor | None) -> None:
        self._rows, self._visible = rows, visible

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._rows.append(key, value)
        if self._visible is None:
            return grouped_attention(query, keys, values, None, causal=True)
        return grouped_attention(query, keys, values, self._visible[None, None])


def causal_after(past: int, new: int, device: torch.device) -> Tensor | None:
    """What `new` rows of a text see behind `past` others, bool [n, S+n].

    None, causal without a mask, where there are no others: a prompt's rows need none of their number squared.
    """
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past) if past else None
