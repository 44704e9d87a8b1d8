"""The KV cache: buffers that grow without a copy in each pass, and from which rejected drafts are dropped.

The only file that uses the cache API of transformers.

Legend: B batch, G key/value heads, S stored tokens, C head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_CAPACITY = 256


class KVBuffer:
    """Key and value rows of one attention layer in a buffer that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None  # [B, G, capacity, C]
        self._values: Tensor | None = None  # [B, G, capacity, C]

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffer grows."""
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return 0 if self._keys is None else self._keys.shape[0]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, G, n, C] more rows; returns views of all rows, [B, G, S, C]."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None or self.capacity < end:
            self._keys = self._grown(self._keys, keys, end)
            self._values = self._grown(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def move(self, rows: Tensor, source: Tensor, place: Tensor) -> None:
        """Copy the stored token `source` [m] of batch row `rows` [m] to `place` [m]."""
        if self._keys is not None and self._values is not None:
            self._keys[rows, :, place] = self._keys[rows, :, source]  # the right side is gathered before the write
            self._values[rows, :, place] = self._values[rows, :, source]

    def crop(self, length: int) -> None:
        """Drop all tokens from `length` on."""
        self.length = min(length, self.length)

    def select(self, index: Tensor) -> None:
        """Keep the batch rows `index` [n]."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[index], self._values[index]

    def insert(self, rows: Sequence[int], other: KVBuffer) -> None:
        """Replace the first tokens of the batch rows `rows` by those of `other`."""
        keys, values = other._keys, other._values
        if self._keys is None or self._values is None or keys is None or values is None:
            return
        end = other.length
        if self.capacity < end:
            self._keys, self._values = self._grown(self._keys, keys, end), self._grown(self._values, values, end)
        if self.length < end:  # no row may hold what was never written: hidden by a mask, NaN is NaN still
            self._keys[:, :, self.length : end] = 0
            self._values[:, :, self.length : end] = 0
            self.length = end
        self._keys[rows, :, :end] = keys[:, :, :end]
        self._values[rows, :, :end] = values[:, :, :end]

    def _grown(self, old: Tensor | None, new: Tensor, needed: int) -> Tensor:
        capacity = max(_FIRST_CAPACITY, needed + needed // 2)
        batch, heads, _, size = (new if old is None else old).shape
        buffer = new.new_empty(batch, heads, capacity, size)
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


class _Layer(DynamicLayer):
    """A `KVBuffer` with the interface of transformers' cache layers."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = KVBuffer()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.buffer.append(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.buffer.length


class KVCache(Cache):
    """The target's cache: `keep` commits the accepted paths of trees, `crop` cuts to a length.

    Every batch row is left-aligned, so that a token's column is its position. In rows of unequal length the columns
    from `lengths[row]` to `length` are unused.
    """

    layers: list[_Layer]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_Layer)
        self.lengths: list[int] | None = None  # tokens of each row; None: all rows are `length` long

    @property
    def length(self) -> int:
        """Columns in use: tokens of the longest row."""
        return max((layer.buffer.length for layer in self.layers), default=0)  # a skipped layer has none

    def keep(self, paths: Sequence[Sequence[int]], width: int) -> None:
        """After trees were appended from column `width` on, keep the nodes `paths[row]` (ascending, the root first) of
        each row, after the row's own tokens."""
        before = self.lengths or [width] * len(paths)
        after = [length + len(path) for length, path in zip(before, paths, strict=True)]
        moves = [
            (row, width + node, before[row] + i)
            for row, path in enumerate(paths)
            for i, node in enumerate(path)
            if width + node != before[row] + i
        ]
        if moves:
            rows, source, place = torch.tensor(moves, device=self.layers[-1].device).unbind(1)
        for layer in self.layers:
            if moves and layer.buffer.length:
                layer.buffer.move(rows, source, place)
            layer.buffer.crop(max(after))
        self.lengths = after if min(after) < max(after) else None

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the number of tokens of each row after prompts of unequal length were stored, padded on the right."""
        self.lengths = list(lengths) if min(lengths) < self.length else None

    def select(self, index: Tensor) -> None:
        """Keep the batch rows `index` [n]."""
        if self.lengths is not None:
            self.lengths = [self.lengths[row] for row in index.tolist()]
        longest = max(self.lengths or [self.length])
        if self.lengths is not None and min(self.lengths) == longest:
            self.lengths = None
        for layer in self.layers:
            layer.buffer.select(index)
            layer.buffer.crop(longest)

    def insert(self, rows: Sequence[int], other: KVCache) -> None:
        """Replace the batch rows `rows` by the rows of `other`, in that order."""
        batch = max(layer.buffer.batch for layer in self.layers)
        lengths = self.lengths or [self.length] * batch
        for row, length in zip(rows, other.lengths or [other.length] * len(rows), strict=True):
            lengths[row] = length
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.buffer.insert(rows, new.buffer)
            layer.buffer.crop(max(lengths))
        self.lengths = lengths if min(lengths) < max(lengths) else None

    def crop(self, length: int) -> None:
        """Drop all tokens from position `length` on."""
        if self.lengths is not None:
            self.lengths = [min(own, length) for own in self.lengths] if min(self.lengths) < length else None
        for layer in self.layers:
            layer.buffer.crop(length)
