"""A cache of the frozen target's outputs, so that later epochs skip its forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from spechead.target.model import TargetOutput


class FeatureCache:
    """Target outputs by the sample ids of a batch, up to `limit_gb` (2^30 bytes); what does not fit is not kept."""

    def __init__(self, limit_gb: float) -> None:
        self._free = limit_gb * 2**30
        self._outputs: dict[tuple[int, ...], TargetOutput] = {}

    def get(self, rows: Sequence[int]) -> TargetOutput | None:
        return self._outputs.get(tuple(rows))

    def add(self, rows: Sequence[int], out: TargetOutput) -> None:
        size = sum(t.numel() * t.element_size() for t in (out.hidden, out.features))
        if size <= self._free:
            self._free -= size
            self._outputs[tuple(rows)] = out
