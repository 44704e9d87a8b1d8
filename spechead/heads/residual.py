"""The base of Medusa and Hydra: a stack of residual blocks and an output layer for each depth of the draft.

Legend: H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.heads.base import Head
from spechead.target.model import Target


class Block(nn.Module):
    """P x + SiLU(W x + b), initialised to return the first H of its inputs.

    P is the identity if there are only H inputs, else trained.
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.residual: nn.Module = nn.Identity()
        if inputs > size:
            self.residual = projection = nn.Linear(inputs, size, bias=False)
            nn.init.eye_(projection.weight)

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., H]
        return self.residual(x) + F.silu(self.linear(x))


class ResidualHead(Head):
    """A head with `n_heads` stacks.

    A subclass builds the stacks first and then calls `add_outputs`, which fixes the order of parameters and random
    draws.
    """

    def __init__(self, config: Any, target: Target) -> None:
        if config.output not in ("own", "shared"):
            raise UserError(f"option head.options.output: {config.output!r} is not one of own, shared")
        super().__init__(config, target)
        self.taps = ()
        self.depths = config.n_heads
        self.tree = chain(config.n_heads)

    def add_outputs(self) -> None:
        """Add an output layer for each stack, unless all use the target's."""
        self.lm_heads = nn.ModuleList()
        if self.config.output == "own":
            size = self.config.hidden_size
            self.lm_heads.extend(nn.Linear(size, self.draft_size, bias=False) for _ in range(self.depths))

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's rows into every output layer, so that each stack first predicts the target's next token."""
        weight, _ = self.target.output_rows(self.draft_ids())
        for layer in self.lm_heads.parameters():
            layer.copy_(weight)

    def output(self, state: Tensor, k: int) -> Tensor:  # [..., H] -> [..., D]
        """Logits of a state that stack k returned."""
        return self.lm_heads[k](state) if self.config.output == "own" else self.target_logits(state)
