"""Sources of random numbers for drafting and verification.

All draws go through a `RandomSource`, so that tests can enumerate every outcome of the code that runs and compute its
exact distribution.

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
        """An index, with probability proportional to its weight in `weights` [V]; none is negative, one is positive."""


class SeededSource:
    """A seeded generator; the same seed gives the same draws on every device.

    `categorical` raises ValueError where the sum of the weights is not positive and finite.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def bernoulli(self, probability: float) -> bool:
        return self._uniform().item() < probability

    def categorical(self, weights: Tensor) -> int:
        # In float64, so that small weights of a large vocabulary are not lost in the sum.
        edges = weights.to("cpu", torch.float64).cumsum(0)  # [V]
        if not 0 < edges[-1].item() < math.inf:
            raise ValueError(f"the sum of the weights is {edges[-1].item()}, not a positive number")
        return int(torch.searchsorted(edges, self._uniform() * edges[-1], right=True))

    def _uniform(self) -> Tensor:  # float64 [1] in [0, 1)
        return torch.rand(1, generator=self._generator, dtype=torch.float64)
