"""Remember the target's outputs of training samples, so that later epochs skip its forward.

A frozen target gives the same features each epoch. They stay in memory up to a limit; what does not fit is computed
again. Knows nothing of heads.
"""

from __future__ import annotations

from collections.abc import Callable

from spechead.target.model import TargetOutput

Key = tuple[int, ...]


class FeatureCache:
    """Outputs by the sample ids of a batch, up to `limit_gb` (2^30 bytes)."""

    def __init__(self, limit_gb: float) -> None:
        self._free = limit_gb * 2**30
        self._held: dict[Key, TargetOutput] = {}

    def recall(self, key: Key, compute: Callable[[], TargetOutput]) -> TargetOutput:
        """The output known under `key`, else that of `compute`, remembered while there is room."""
        if key not in self._held:
            out = compute()
            size = sum(t.numel() * t.element_size() for t in (out.hidden, out.features))
            if size > self._free:
                return out
            self._free -= size
            self._held[key] = out
        return self._held[key]
