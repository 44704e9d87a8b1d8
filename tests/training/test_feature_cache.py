"""The memory of target outputs: the same numbers, fewer forwards, a limit."""

from __future__ import annotations

import torch

from spechead.target.model import TargetOutput
from spechead.training.feature_cache import FeatureCache


def output(rows: int) -> TargetOutput:
    return TargetOutput(torch.zeros(1, rows, 64), torch.zeros(1, rows, 192))  # 1 KiB a row


def test_known_outputs_are_not_computed_again() -> None:
    memory, made = FeatureCache(1.0), []

    def compute() -> TargetOutput:
        made.append(output(4))
        return made[-1]

    first = memory.recall((3,), compute)
    assert memory.recall((3,), compute) is first and len(made) == 1
    assert memory.recall((4,), compute) is not first and len(made) == 2


def test_what_does_not_fit_is_computed_again() -> None:
    memory, made = FeatureCache(10 / 2**20), []  # 10 KiB

    def compute() -> TargetOutput:
        made.append(1)
        return output(4)

    for _ in range(2):
        for key in range(4):
            memory.recall((key,), compute)
    assert len(made) == 4 + 2  # two of four fit

    off = FeatureCache(0.0)
    assert off.recall((0,), compute) is not off.recall((0,), compute)
