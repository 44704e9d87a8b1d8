"""What the engine wraps: the target's forward, then the head's training step, and the loss of training both jointly.

Knows nothing of optimizers, ranks or files.

Legend: B rows, T tokens, H hidden size, V vocabulary, n supervised positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.heads import Head
from spechead.heads.base import Hits, ahead
from spechead.heads.draft_loss import LOGITS_AT_ONCE, in_chunks
from spechead.heads.losses import hard_cross_entropy, soft_cross_entropy
from spechead.target.adapter import Adapter
from spechead.target.model import TargetOutput
from spechead.training.feature_cache import FeatureCache
from spechead.training.recipe import AdapterConfig


class TrainingModule(nn.Module):
    """The frozen target's forward, then the head's training step."""

    def __init__(self, head: Head, memory: FeatureCache) -> None:
        super().__init__()
        self.head, self.memory = head, memory

    def forward(self, batch: Batch, progress: float = 1.0) -> tuple[Tensor, Hits, Tensor | None]:
        """The loss summed over supervised positions, the hits, and what the loss is made of: see `JointModule`."""
        step = self.head.training_step(batch, self.remembered(batch))
        return step.loss, step.hits, None

    def remembered(self, batch: Batch) -> TargetOutput:
        """What the frozen target says of the batch, computed once while memory lasts."""
        return self.memory.recall(tuple(batch.rows), lambda: self.target_output(batch))

    def target_output(self, batch: Batch, gradient: bool = False) -> TargetOutput:
        single = bool((batch.document == 0).all())  # one document a row, no padding: plain causal
        visible = None if single else batch.document[:, :, None] == batch.document[:, None, :]
        return self.head.target.forward(
            batch.ids,
            taps=self.head.taps,
            positions=batch.positions,
            visible=None if visible is None else visible.tril(),
            gradient=gradient,
        )


class JointModule(TrainingModule):
    """Head and adapter trained together (Medusa-2, arXiv 2401.10774, section 2.2.2), behind a stage of the head alone.

    The loss of the second stage is L_target + λ L_head. L_target keeps the target what it was: the divergence from the
    target without the adapter ("self-distillation", section 2.3.2), or cross-entropy with the text.
    """

    def __init__(self, head: Head, memory: FeatureCache, adapter: Adapter, config: AdapterConfig) -> None:
        super().__init__(head, memory)
        self.adapter, self.config = adapter, config
        self.adapter_parameters = nn.ParameterList(adapter.parameters)
        self.train()

    def train(self, mode: bool = True) -> JointModule:
        self.adapter.train(mode)
        super().train(mode)
        return self

    def forward(self, batch: Batch, progress: float = 1.0) -> tuple[Tensor, Hits, Tensor | None]:
        """`progress`: the share of the second stage that is behind; below 0 in the first.

        In the second, the loss comes with L_head and L_target, [2], without a gradient.
        """
        if progress < 0:  # a zero gradient, so that every rank and optimizer sees the same parameters
            step = self.head.training_step(batch, self.remembered(batch))
            return step.loss + 0.0 * sum(p.float().sum() for p in self.adapter_parameters), step.hits, None
        out = self.target_output(batch, gradient=torch.is_grad_enabled())
        step = self.head.training_step(batch, out)
        of_target = self.target_loss(batch, out)
        loss = head_weight(self.config, progress) * step.loss + of_target
        return loss, step.hits, torch.stack([step.loss, of_target]).detach()

    def remembered(self, batch: Batch) -> TargetOutput:
        with self.adapter.off():
            return super().remembered(batch)

    def target_loss(self, batch: Batch, out: TargetOutput) -> Tensor:
        """L_target, summed over the positions that predict a supervised token; for some of them at a time."""
        ids, predicts = ahead(batch, 1)  # [B, T]
        states = out.hidden[predicts]  # [n, H]
        by_text = self.config.loss == "text"
        wanted = ids[predicts] if by_text else self.remembered(batch).hidden[predicts]  # [n] or [n, H]
        width = self.head.target.vocab_size
        if states.shape[0] * width <= LOGITS_AT_ONCE:
            return self._kept_loss(states, wanted)
        return torch.stack(in_chunks(self._kept_loss, width, states, wanted)).sum()

    def _kept_loss(self, states: Tensor, wanted: Tensor) -> Tensor:
        target = self.head.target
        logits = target.scaled(F.linear(states, *target.output_rows(None)).float())  # [n, V]
        if self.config.loss == "text":
            return hard_cross_entropy(logits, wanted)
        return soft_cross_entropy(logits, target.logits(wanted))


def head_weight(config: AdapterConfig, progress: float) -> float:
    """λ when the share `progress` of the second stage is behind: constant, or rising over it."""
    rise = {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}
    return config.head_weight * rise[config.head_schedule]
