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


def test_one_row_is_replaced_and_the_others_stay() -> None:
    cache, anew = KVCache(), KVCache()
    append(cache, [[1, 2, 3], [7, 8, 0]])
    cache.set_lengths([3, 2])
    append(anew, [[17, 18, 19]])
    anew.crop(2)
    cache.replace(1, anew)
    assert stored(cache) == [[1, 2, 3], [17, 18]] and cache.length == 3
