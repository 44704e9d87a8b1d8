"""Training of a head and an adapter on its target together (Medusa-2): the two stages, their loss and learning rates.

Legend: B rows, T tokens, H hidden size, V vocabulary, n supervised positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.heads import Head
from spechead.heads.base import ahead
from spechead.heads.draft_loss import LOGITS_AT_ONCE, in_chunks
from spechead.heads.losses import hard_cross_entropy, soft_cross_entropy
from spechead.target.adapter import Adapter
from spechead.target.model import TargetOutput
from spechead.training.engine import Group, learning_rate_factor
from spechead.training.module import FeatureCache, StepOutput, TrainingModule
from spechead.training.recipe import AdapterConfig, OptimConfig


class JointModule(TrainingModule):
    """Head and adapter trained together (Medusa-2, arXiv 2401.10774, section 2.2.2), after a stage of the head alone.

    The loss of the second stage is L_target + λ L_head. L_target keeps the target what it was: the divergence from the
    target without the adapter ("self-distillation", section 2.3.2), or cross-entropy with the text.
    """

    parts = ("head_loss", "target_loss")

    def __init__(self, head: Head, cache: FeatureCache, adapter: Adapter, config: AdapterConfig, total: int) -> None:
        """`total`: optimizer steps of both stages."""
        super().__init__(head, cache)
        self.adapter: Adapter = adapter
        self.config, self.total = config, total
        self.alone = min(total - 1, round(config.start_share * total))  # steps of the first stage
        self.adapter_parameters = nn.ParameterList(adapter.parameters)
        self.train()

    def train(self, mode: bool = True) -> JointModule:
        self.adapter.train(mode)
        super().train(mode)
        return self

    def forward(self, batch: Batch, step: int) -> StepOutput:
        if step <= self.alone:  # a zero gradient, so that every rank and optimizer sees the same parameters
            result = self.head.training_step(batch, self.frozen_output(batch))
            return StepOutput(result.loss + 0.0 * sum(p.float().sum() for p in self.adapter_parameters), result.hits)
        out = self.target_output(batch, gradient=torch.is_grad_enabled())
        result = self.head.training_step(batch, out)
        target_loss = self.target_loss(batch, out)
        progress = (step - 1 - self.alone) / (self.total - self.alone)
        loss = head_weight(self.config, progress) * result.loss + target_loss
        parts = {"head_loss": result.loss.detach(), "target_loss": target_loss.detach()}
        return StepOutput(loss, result.hits, parts)

    def frozen_output(self, batch: Batch) -> TargetOutput:
        with self.adapter.off():
            return super().frozen_output(batch)

    def target_loss(self, batch: Batch, out: TargetOutput) -> Tensor:
        """L_target, summed over the positions that predict a supervised token; in chunks where there are many."""
        ids, predicts = ahead(batch, 1)  # [B, T]
        states = out.hidden[predicts]  # [n, H]
        by_text = self.config.loss == "text"
        labels = ids[predicts] if by_text else self.frozen_output(batch).hidden[predicts]  # [n] or [n, H]
        width = self.head.target.vocab_size
        if states.shape[0] * width <= LOGITS_AT_ONCE:
            return self._chunk_loss(states, labels)
        return torch.stack(in_chunks(self._chunk_loss, width, states, labels)).sum()

    def _chunk_loss(self, states: Tensor, labels: Tensor) -> Tensor:
        target = self.head.target
        logits = target.scaled(F.linear(states, *target.output_rows(None)).float())  # [n, V]
        if self.config.loss == "text":
            return hard_cross_entropy(logits, labels)
        return soft_cross_entropy(logits, target.logits(labels))

    def groups(self, optim: OptimConfig, total: int) -> list[Group]:
        """The head's group, and the adapter's: its rate is 0 in the first stage, and its schedule spans the second."""
        factor = learning_rate_factor(optim.schedule, total - self.alone, optim.warmup_share, optim.min_lr_share)
        adapter = Group(
            self.adapter.parameters,
            self.config.lr,
            lambda step: factor(step - self.alone) if step >= self.alone else 0.0,
        )
        return [*super().groups(optim, total), adapter]

    def seed_dropout(self, seed: int) -> None:
        """Seed the adapter's dropout: the same after a resume, and different on each rank."""
        torch.manual_seed(seed)

    def comparable(self, step: int) -> bool:
        """False in the first stage: validations of the target without the adapter do not compare with later ones."""
        return step > self.alone


def head_weight(config: AdapterConfig, progress: float) -> float:
    """λ after the share `progress` of the second stage: constant, or rising."""
    rise = {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}
    return config.head_weight * rise[config.head_schedule]
