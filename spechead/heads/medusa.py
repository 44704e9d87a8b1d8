"""Medusa-1 (arXiv 2401.10774): K parallel heads on the last hidden state.

Head k predicts the token k + 2 places further on.

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
from spechead.heads.base import StepLoss, targets_size
from spechead.heads.draft_loss import DraftLoss
from spechead.heads.losses import LOSSES
from spechead.heads.residual import Block, ResidualHead
from spechead.options import Range
from spechead.target.model import Target, TargetOutput


@dataclass
class MedusaConfig:
    """Shape and loss of the heads."""

    n_heads: Annotated[int, Range(1)] = 4
    """Parallel heads; also the deepest draft."""
    n_layers: Annotated[int, Range(1)] = 1
    """Residual blocks of each head."""
    output: str = "own"
    """`own`: each head trains its output layer; `shared`: the target's, frozen, no weight of its own."""
    draft_vocab_size: Annotated[int, Range(0)] = 0
    """Rows of the output layer (the most frequent supervised tokens); 0 is the target's whole vocabulary."""
    decay: Annotated[float, Range(0)] = 0.8
    """λ: head k's loss weighs λ^k."""
    hidden_size: Annotated[int, Range(0)] = 0
    """0: the target's."""


class Medusa(ResidualHead):
    """K residual stacks over the target's final hidden state, each with an output layer."""

    kind = "medusa"
    Config = MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        config.hidden_size = targets_size(config.hidden_size, target)
        super().__init__(config, target)
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(size, size) for _ in range(config.n_layers))) for _ in range(config.n_heads)
        )
        self.add_outputs()

    def head_logits(self, hidden: Tensor, k: int) -> Tensor:  # [..., H] -> [..., D]
        return self.output(self.blocks[k](hidden), k)

    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """Σ_k λ^k cross-entropy of head k.

        It runs over the rows whose token ahead(2 + k) is supervised and in the draft vocabulary.
        """
        judge = DraftLoss(self, batch, out, LOSSES["hard_ce"])
        loss = out.hidden.new_zeros((), dtype=torch.float32)
        for k in range(self.config.n_heads):
            states = self.blocks[k](out.hidden[judge.rows[k]].to(self.dtype))  # [n, H]
            loss = loss + self.config.decay**k * judge.loss(k, states, partial(self.output, k=k))
        return StepLoss(loss, judge.hits)

    def new_state(self, prompt: Tensor) -> None:
        return None

    @torch.no_grad()
    def propose(
        self, state: None, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """Head k's distribution serves every node of depth k + 1, whatever its parent."""
        hidden = out.hidden[0, -1:].to(self.dtype)  # [1, H]
        depth = iter(range(1, self.config.n_heads))

        def deepen(_: Tensor, __: Tensor, ___: Tensor) -> Tensor:
            return self.head_logits(hidden, next(depth)).float().log_softmax(-1)

        first = self.head_logits(hidden, 0).float().log_softmax(-1)  # [1, D]
        plan = plan.limited(self.depths)
        return grow(plan, fresh[-1], first, self.draft_ids(), deepen, drawing, self.target.vocab_size)
