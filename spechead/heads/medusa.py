"""Medusa-1 (arXiv 2401.10774): K parallel heads on the last hidden state; head k at row t predicts token t + 2 + k.

Legend: B batch, T rows, K heads, H hidden size, D draft vocabulary, n positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.decoding.grow import grow
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Tree
from spechead.heads.base import Role, StepLoss, same_hidden_size
from spechead.heads.draft_loss import DraftLoss
from spechead.heads.losses import LOSSES
from spechead.heads.residual import Block, ResidualHead
from spechead.options import Range
from spechead.target.model import Target, TargetOutput


@dataclass
class MedusaConfig:
    """Shape and loss of the heads."""

    n_heads: Annotated[int, Range(1), Role.COUNT] = 4
    """Parallel heads, and so the deepest draft."""
    n_layers: Annotated[int, Range(1), Role.COUNT] = 1
    """Residual blocks of each head."""
    output: Annotated[str, Role.TENSORS] = "own"
    """`own`: each head trains an output layer; `shared`: the target's, frozen, without weights of its own."""
    draft_vocab_size: Annotated[int, Range(0), Role.SIZE] = 0
    """Rows of the output layer (the most frequent supervised tokens); 0 is the target's whole vocabulary."""
    decay: Annotated[float, Range(0), Role.TRAINING] = 0.8
    """λ: the weight of head k's loss is λ^k."""
    hidden_size: Annotated[int, Range(0), Role.SIZE] = 0
    """0: the target's."""


class Medusa(ResidualHead):
    """K residual stacks over the target's final hidden state, each with an output layer."""

    kind = "medusa"
    title = "Medusa"
    Config = MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        config.hidden_size = same_hidden_size(config.hidden_size, target)
        super().__init__(config, target)
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(size, size) for _ in range(config.n_layers))) for _ in range(config.n_heads)
        )
        self.add_outputs()

    def head_logits(self, hidden: Tensor, k: int) -> Tensor:  # [..., H] -> [..., D]
        return self.output(self.blocks[k](hidden), k)

    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """Σ_k λ^k cross-entropy of head k, over rows whose label ahead(2 + k) is supervised and can be drafted."""
        draft_loss = DraftLoss(self, batch, out, LOSSES["hard_ce"])
        loss = out.hidden.new_zeros((), dtype=torch.float32)
        for k in range(self.config.n_heads):
            states = self.blocks[k](out.hidden[draft_loss.rows[k]].to(self.dtype))  # [n, H]
            loss = loss + self.config.decay**k * draft_loss.loss(k, states, partial(self.output, k=k))
        return StepLoss(loss, draft_loss.hits)

    def new_state(self, prompt: Tensor) -> None:
        return None

    @torch.no_grad()
    def propose(
        self, state: None, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """All nodes of depth k + 1 share head k's distribution, whatever their parents."""
        hidden = out.hidden[0, -1:].to(self.dtype)  # [1, H]
        depth = iter(range(1, self.config.n_heads))

        def deepen(_: Tensor, __: Tensor, ___: Tensor) -> Tensor:
            return self.head_logits(hidden, next(depth)).float().log_softmax(-1)

        first = self.head_logits(hidden, 0).float().log_softmax(-1)  # [1, D]
        plan = plan.limited(self.depths)
        return grow(plan, fresh[-1], first, self.draft_ids(), deepen, drawing, self.target.vocab_size)
