"""The module that the engine wraps: the frozen target's forward pass, then the head's training step.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.heads import Head
from spechead.heads.base import Hits
from spechead.target.adapter import Adapter
from spechead.target.model import TargetOutput
from spechead.training.engine import Group, learning_rate_factor
from spechead.training.recipe import OptimConfig


class StepOutput(NamedTuple):
    """What a forward pass returns. A tuple, since DeepSpeed finds the loss in tuples, but not in dataclasses."""

    loss: Tensor  # float [], summed over supervised positions
    hits: Hits
    parts: Mapping[str, Tensor] = {}  # float [] each, without gradient: the losses in `loss`, where there are several


class FeatureCache:
    """Outputs of the frozen target, so that later epochs skip its forward pass; what exceeds `limit_gb` (2^30 bytes) is
    not kept."""

    def __init__(self, limit_gb: float) -> None:
        self.enabled = limit_gb > 0
        self._free = limit_gb * 2**30
        self._outputs: dict[tuple[int, ...], TargetOutput] = {}  # by the sample ids of a batch

    def get(self, rows: Sequence[int]) -> TargetOutput | None:
        return self._outputs.get(tuple(rows))

    def add(self, rows: Sequence[int], out: TargetOutput) -> None:
        size = sum(t.numel() * t.element_size() for t in (out.hidden, out.features))
        if size <= self._free:
            self._free -= size
            self._outputs[tuple(rows)] = out


class TrainingModule(nn.Module):
    """The training of a head on a frozen target."""

    adapter: Adapter | None = None  # trained along with the head: see `joint.JointModule`
    parts: tuple[str, ...] = ()  # the names in `StepOutput.parts`

    def __init__(self, head: Head, cache: FeatureCache) -> None:
        super().__init__()
        self.head, self.cache = head, cache

    def forward(self, batch: Batch, step: int) -> StepOutput:
        """`step`: the optimizer step, from 1."""
        result = self.head.training_step(batch, self.frozen_output(batch))
        return StepOutput(result.loss, result.hits)

    def frozen_output(self, batch: Batch) -> TargetOutput:
        """The frozen target's output, cached while memory lasts."""
        if not self.cache.enabled:
            return self.target_output(batch)
        key = [*batch.rows, hash(batch.ids.cpu().numpy().tobytes())]  # several samples may be of one conversation
        out = self.cache.get(key)
        if out is None:
            out = self.target_output(batch)
            self.cache.add(key, out)
        return out

    def target_output(self, batch: Batch, gradient: bool = False) -> TargetOutput:
        single = bool((batch.document == 0).all())  # one document a row, no padding: plain causal
        visible = None if single else batch.document[:, :, None] == batch.document[:, None, :]  # [B, T, T]
        return self.head.target.forward(
            batch.ids,
            taps=self.head.taps,
            positions=batch.positions,
            visible=None if visible is None else visible.tril(),
            gradient=gradient,
        )

    def groups(self, optim: OptimConfig, total: int) -> list[Group]:
        """The trained parameters with their learning rates over `total` steps."""
        factor = learning_rate_factor(optim.schedule, total, optim.warmup_share, optim.min_lr_share)
        return [Group(list(self.head.parameters()), optim.lr, factor)]

    def seed_dropout(self, seed: int) -> None:
        """Called before each step; a head's own noise follows the run's random state and needs no seed."""

    def comparable(self, step: int) -> bool:
        """Whether a validation after `step` is of the target that the finished head is for."""
        return True
