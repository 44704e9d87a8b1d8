"""A source of random outcomes: a seeded generator, or in tests an enumeration of every outcome.

Verification and drafting draw through a `RandomSource`, so that tests compute the exact distribution of the code that
runs.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class RandomSource(Protocol):
    """Bernoulli and categorical draws."""

    def bernoulli(self, probability: float) -> bool:
        """True with `probability`, from 0 to 1."""

    def categorical(self, weights: Tensor) -> int:
        """An index of `weights` [V] with probability proportional to its weight. None is negative, one is positive."""


class SeededSource:
    """The same seed gives the same outcomes, on every device. Raises ValueError where no weight is positive."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def bernoulli(self, probability: float) -> bool:
        return self._uniform().item() < probability

    def categorical(self, weights: Tensor) -> int:
        # In float64 no weight of a large vocabulary is lost in the sum; a weight of zero spans nothing to fall into.
        edges = weights.to("cpu", torch.float64).cumsum(0)  # [V]
        if not 0 < edges[-1].item() < math.inf:
            raise ValueError(f"the weights to choose by sum to {edges[-1].item()}, not to a positive number")
        return int(torch.searchsorted(edges, self._uniform() * edges[-1], right=True))

    def _uniform(self) -> Tensor:  # float64 [1] in [0, 1)
        return torch.rand(1, generator=self._generator, dtype=torch.float64)
