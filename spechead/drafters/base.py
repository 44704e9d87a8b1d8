"""The protocol of drafters, which heads and training-free drafters implement.

Legend: n tokens committed since the last proposal, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Static, Tree, chain
from spechead.target.model import TargetOutput


class Drafter(Protocol):
    """Proposes trees of drafts.

    `taps`: indices of the target's hidden states that it reads in `out.features`. `tree`: its default plan. `branches`:
    without it, it drafts a chain as deep as the plan, whatever the plan's shape.
    """

    taps: Sequence[int]
    tree: Plan
    branches: bool

    def new_state(self, prompt: Tensor) -> Any:
        """The drafter's state of one sequence, given its prompt int64 [P]."""

    def propose(self, state: Any, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None) -> Tree:
        """Draft, no deeper than `plan`, after `fresh` int64 [n], the tokens just committed.

        `out` contains the target's rows [1, n, ...] before them: row i is the position whose next token is fresh[i]. In
        the first call `fresh` is the prompt without its first token, followed by the first new token, and `out` has
        rows 0..P-1. The root of the tree is fresh[-1].

        Drafts are the best ranked, or sampled by `drawing`; the tree then has `drawn_from`. Raises UserError where a
        drafter cannot sample, or not in that plan.
        """


def is_chain(plan: Plan) -> bool:
    """Whether trees of this plan are chains."""
    return isinstance(plan, Static) and plan.choices == chain(plan.depth).choices


def can_draft(drafter: Drafter | type[Drafter], plan: Plan) -> bool:
    """Whether the drafter's trees have the shape of `plan`: a drafter that does not branch needs a chain."""
    return drafter.branches or is_chain(plan)
