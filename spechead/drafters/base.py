"""The drafter's side of the decode loop. Knows nothing of how a draft is verified.

Legend: n tokens committed since the last proposal, K tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from spechead.sampling import Drawing
from spechead.target import TargetOutput
from spechead.tree import Plan, Tree


class Drafter(Protocol):
    """Proposes a tree.

    `layers` are the target's layers it wants in `out.features`; `tree` is its plan where none is asked.
    """

    layers: Sequence[int]
    tree: Plan

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
