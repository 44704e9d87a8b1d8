"""What Medusa and Hydra share: for each depth of draft a stack of residual blocks, and behind it an output layer.

Knows nothing of what a stack reads, nor of how the stacks are trained.

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
    """P x + SiLU(W x + b), at the start the first H of its inputs.

    P is the identity where there are no more inputs than that, else trained.
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

    A subclass makes these, then calls `add_outputs`: parameters and random draws keep that order.
    """

    def __init__(self, config: Any, target: Target) -> None:
        if config.output not in ("own", "shared"):
            raise UserError(f"head.options.output {config.output!r} is not own or shared")
        super().__init__(config, target)
        self.taps = ()
        self.depths = config.n_heads
        self.tree = chain(config.n_heads)

    def add_outputs(self) -> None:
        """An output layer for each stack, unless all read the target's."""
        self.lm_heads = nn.ModuleList()
        if self.config.output == "own":
            size = self.config.hidden_size
            self.lm_heads.extend(nn.Linear(size, self.draft_size, bias=False) for _ in range(self.depths))

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Every output layer starts as the target's rows, so that stack k first repeats the next token."""
        weight, _ = self.target.output_rows(self.draft_ids())
        for layer in self.lm_heads.parameters():
            layer.copy_(weight)

    def output(self, state: Tensor, k: int) -> Tensor:  # [..., H] -> [..., D]
        """What is said of a state behind stack k."""
        return self.lm_heads[k](state) if self.config.output == "own" else self.target_logits(state)
