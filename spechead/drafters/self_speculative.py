"""The target drafts for itself with some of its layers left out (Draft & Verify, arXiv 2309.08168).

Keeping the first layers alone is drafting by early exit (LayerSkip, arXiv 2404.16710). Weights are shared with the
target; the drafts have a cache of their own. Knows nothing of how a draft is verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from spechead.drafters.draft_model import DraftModel
from spechead.target.model import Target


class SelfSpeculative(DraftModel):
    """A draft model that is the target's own decoder layers `layers` (from 0), without a second copy of weights.

    Take it after the target is packed, if it is to be. Raises UserError where the target has no such layers.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        super().__init__(target, target.subset(layers))
