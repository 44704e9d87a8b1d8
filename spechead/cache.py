"""Keys and values of committed tokens: storage that grows without a copy at each pass, and drops rejected drafts.

The only file that touches transformers' cache API. Knows nothing of trees beyond "these rows stay".

Legend: B batch, G key/value heads, S stored tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_CAPACITY = 256


class Rows:
    """Key and value rows of one attention layer in a buffer that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None  # [B, G, capacity, D]
        self._values: Tensor | None = None  # [B, G, capacity, D]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, G, n, D] more rows; returns views of all rows, [B, G, S, D]."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None or self._keys.shape[2] < end:
            self._keys = self._grown(self._keys, keys, end)
            self._values = self._grown(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def keep(self, past: int, path: Tensor | None, length: int) -> None:
        """Of the rows from `past` on keep those at past + path, moved together; None when they already lie so."""
        if path is not None and self._keys is not None and self._values is not None:
            self._keys[:, :, past:length] = self._keys[:, :, past + path]
            self._values[:, :, past:length] = self._values[:, :, past + path]
        self.length = length

    def select(self, index: Tensor) -> None:
        """Keep the batch rows `index` [n]."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[index], self._values[index]

    def _grown(self, old: Tensor | None, new: Tensor, needed: int) -> Tensor:
        capacity = max(_FIRST_CAPACITY, 2 * needed)
        batch, heads, _, size = new.shape
        buffer = new.new_empty(batch, heads, capacity, size)
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


class _Layer(DynamicLayer):
    """`Rows` behind the interface of transformers' cache layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.rows.append(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.rows.length


class KVCache(Cache):
    """The target's cache: `keep` commits the accepted path of a tree, `crop` cuts to a length."""

    layers: list[_Layer]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_Layer)

    @property
    def length(self) -> int:
        return self.layers[0].rows.length if self.layers else 0

    def keep(self, past: int, path: Sequence[int]) -> None:
        """After a tree was appended behind `past` tokens, keep its nodes `path` (ascending, the root first)."""
        moved = None
        if list(path) != list(range(len(path))):
            moved = torch.tensor(path, device=self.layers[0].device)
        for layer in self.layers:
            layer.rows.keep(past, moved, past + len(path))

    def select(self, index: Tensor) -> None:
        """Keep the batch rows `index` [n]."""
        for layer in self.layers:
            layer.rows.select(index)

    def crop(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        for layer in self.layers:
            layer.rows.keep(length, None, min(length, layer.rows.length))
