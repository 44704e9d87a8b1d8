"""The drafter's side of the decode loop. Knows nothing of how a draft is verified.

Legend: n tokens committed since the last proposal, K tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Static, Tree, chain
from spechead.target.model import TargetOutput


class Drafter(Protocol):
    """Proposes a tree.

    `taps` are the target's hidden states that it reads in `out.features`; `tree` is its plan where none is given. One
    that does not branch drafts a chain as deep as the plan, whatever its shape.
    """

    taps: Sequence[int]
    tree: Plan
    branches: bool

    def new_state(self, prompt: Tensor) -> Any:
        """What the drafter remembers of one text, at its beginning; prompt int64 [P]."""

    def propose(self, state: Any, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None) -> Tree:
        """Draft, no deeper than `plan`, behind `fresh` int64 [n], the tokens just committed.

        `out` holds the target's rows [1, n, ...] before them: row i is the position whose next token is fresh[i]. The
        first call brings the whole prompt but its first token, and the first new token: rows 0..P-1. The root of the
        tree is fresh[-1].

        Drafts are the best ranked, or sampled where `drawing` says how; the tree then tells what they were drawn from.
        Raises UserError where a drafter cannot sample, or not in that plan.
        """


def is_chain(plan: Plan) -> bool:
    """Whether trees of this plan never branch."""
    return isinstance(plan, Static) and plan.choices == chain(plan.depth).choices


def can_draft(drafter: Drafter | type[Drafter], plan: Plan) -> bool:
    """Whether the drafter's trees have the shape of `plan`; one that does not branch is for chains."""
    return drafter.branches or is_chain(plan)
