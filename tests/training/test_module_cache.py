"""The cache of target outputs: what it keeps, and its limit."""

from __future__ import annotations

import torch

from spechead.target.model import TargetOutput
from spechead.training.module import FeatureCache


def output(rows: int) -> TargetOutput:
    return TargetOutput(torch.zeros(1, rows, 64), torch.zeros(1, rows, 192))  # 1 KiB a row


def test_an_output_is_found_by_the_rows_of_its_batch() -> None:
    cache, out = FeatureCache(1.0), output(4)
    assert cache.get([3]) is None
    cache.add([3], out)
    assert cache.get([3]) is out and cache.get([4]) is None and cache.get([3, 4]) is None


def test_what_does_not_fit_is_not_kept() -> None:
    cache = FeatureCache(10 / 2**20)  # 10 KiB
    for row in range(4):
        cache.add([row], output(4))
    assert [cache.get([row]) is not None for row in range(4)] == [True, True, False, False]
    off = FeatureCache(0.0)
    off.add([0], output(1))
    assert off.get([0]) is None
