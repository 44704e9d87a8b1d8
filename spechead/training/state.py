"""How far a training run is: what a checkpoint holds beside weights and random state.

Knows nothing of models or of how a run validates.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Counts up to now, and what the validations found."""

    step: int = 0  # optimizer steps
    tokens: int = 0  # supervised tokens that they learned from
    validations: list[tuple[int, float]] = field(default_factory=list)  # step and acceptance length (tokens per pass)

    @property
    def best(self) -> int:
        """The step of the greatest acceptance length, the first of equal ones; 0 before any validation."""
        return max(self.validations, key=lambda one: one[1], default=(0, 0.0))[0]

    def over(self, patience: int) -> bool:
        """Whether the last `patience` validations, or more, brought nothing better; never for 0."""
        return 0 < patience <= sum(step > self.best for step, _ in self.validations)
