"""The KV cache against plain lists of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from spechead.target.cache import KVBuffer, KVCache


def rows(values: list[list[int]]) -> Tensor:
    """[B, 1, n, 1]"""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None]


def stored(cache: KVCache) -> list[list[int]]:
    """The tokens of each row, in every layer the same."""
    found = []
    for layer in cache.layers:
        keys, values = layer.buffer._keys, layer.buffer._values
        assert keys is not None and values is not None
        for tokens in (keys, -values):
            lengths = cache.lengths or [cache.length] * len(tokens)
            found.append([tokens[row, 0, :length, 0].int().tolist() for row, length in enumerate(lengths)])
    assert all(tokens == found[0] for tokens in found)
    return found[0]


def append(cache: KVCache, values: list[list[int]]) -> None:
    for layer in range(2):
        cache.update(rows(values), -rows(values), layer)


def test_a_buffer_grows_without_losing_rows() -> None:
    buffer = KVBuffer()
    assert buffer.capacity == 0
    for start in range(0, 600, 100):
        keys, _ = buffer.append(rows([list(range(start, start + 100))]), rows([[0] * 100]))
        assert keys[0, 0, :, 0].tolist() == list(range(start + 100)) and buffer.length <= buffer.capacity


def test_the_accepted_paths_are_kept_after_rows_of_unequal_length() -> None:
    cache = KVCache()
    append(cache, [[1, 2, 3], [7, 8, 0]])
    cache.set_lengths([3, 2])
    append(cache, [[10, 11, 12], [20, 21, 22]])  # a tree of three nodes each
    cache.keep([[0, 2], [0]], 3)
    assert stored(cache) == [[1, 2, 3, 10, 12], [7, 8, 20]] and cache.length == 5
    append(cache, [[30], [40]])
    cache.keep([[0], [0]], 5)
    assert stored(cache) == [[1, 2, 3, 10, 12, 30], [7, 8, 20, 40]]
    cache.select(torch.tensor([1]))
    assert stored(cache) == [[7, 8, 20, 40]] and cache.lengths is None and cache.length == 4
    cache.crop(2)
    assert stored(cache) == [[7, 8]]


def test_rows_of_equal_length_need_no_lengths() -> None:
    cache = KVCache()
    append(cache, [[1, 2], [3, 4]])
    cache.set_lengths([2, 2])
    assert cache.lengths is None
    append(cache, [[5, 6], [7, 8]])
    cache.keep([[0, 1], [0, 1]], 2)
    assert cache.lengths is None and stored(cache) == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_rows_that_have_ended_are_replaced_by_new_ones() -> None:
    cache, new = KVCache(), KVCache()
    append(cache, [[1, 2, 3], [4, 5, 0], [6, 0, 0]])
    cache.set_lengths([3, 2, 1])
    append(new, [[10], [11]])
    cache.insert([0, 2], new)
    assert stored(cache) == [[10], [4, 5], [11]] and cache.length == 2
    longer = KVCache()
    append(longer, [list(range(20, 320)), list(range(30, 330))])
    longer.set_lengths([300, 7])
    cache.insert([1, 0], longer)  # beyond the capacity
    assert stored(cache) == [list(range(30, 37)), list(range(20, 320)), [11]]
    append(cache, [[50], [60], [70]])
    cache.keep([[0], [], [0]], 300)
    assert stored(cache) == [[*range(30, 37), 50], list(range(20, 320)), [11, 70]]


def test_columns_that_no_row_has_written_are_finite() -> None:
    cache, new = KVCache(), KVCache()
    append(cache, [[1], [2]])
    for layer in cache.layers:
        assert layer.buffer._keys is not None and layer.buffer._values is not None
        layer.buffer._keys[:, :, 1:] = torch.nan  # as memory may be
        layer.buffer._values[:, :, 1:] = torch.nan
    append(new, [[3, 4, 5]])
    cache.insert([0], new)
    keys, values = cache.update(rows([[6], [7]]), rows([[6], [7]]), 0)
    assert keys.isfinite().all() and values.isfinite().all() and keys.shape[2] == 4
