"""The target drafts for itself with some of its layers skipped (Draft & Verify, arXiv 2309.08168).

With the first layers only this is drafting by early exit (LayerSkip, arXiv 2404.16710). Weights are shared with the
target; the cache is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from spechead.drafters.draft_model import DraftModel
from spechead.target.model import Target


class SelfSpeculative(DraftModel):
    """A draft model made of the target's decoder layers `layers` (from 0), without a second copy of their weights.

    A target is packed before, not after. Raises UserError where the target has no such layers.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        super().__init__(target, target.subset(layers))
