"""Draft from the text itself: what followed the last few tokens when they stood there before.

The n-gram matching of prompt lookup decoding (2023; transformers' `prompt_lookup_num_tokens`). Costs no model and no
work that grows with the text. Knows nothing of tokens' meaning; an end-of-sequence token is drafted like any other.

Legend: P prompt tokens, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spechead.decoding.tree import Plan, Tree, chain
from spechead.drafters.base import Drawing
from spechead.errors import UserError
from spechead.target.model import TargetOutput

MATCHES = ("first", "latest")
LONGEST = 16  # tokens of an n-gram; each token of the text costs as many look-ups


@dataclass
class LookupState:
    """The tokens of one text, and the places behind every n-gram in them."""

    first: int  # the text's first token, which `fresh` never brings
    tokens: list[int] = field(default_factory=list)
    behind: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # ascending


class PromptLookup:
    """Looks for the last `ngram` tokens, then for fewer, down to one; drafts what followed the longest that is found.

    `match` says which of several places is taken: the `first` (as transformers does), or the `latest`. The draft is a
    chain as deep as the plan, shorter where the text ends, and the root alone where nothing is found. Copies have no
    draft probability, so that a plan's floor is not looked at.
    """

    taps: Sequence[int] = ()
    branches = False

    def __init__(self, ngram: int = 3, match: str = "first") -> None:
        if not 1 <= ngram <= LONGEST:
            raise UserError(f"prompt_lookup: ngram {ngram} is not from 1 to {LONGEST}")
        if match not in MATCHES:
            raise UserError(f"prompt_lookup: match {match!r} is not one of {', '.join(MATCHES)}")
        self.tree: Plan = chain(10)
        self.ngram, self.match = ngram, match

    def new_state(self, prompt: Tensor) -> LookupState:  # int64 [P]
        return LookupState(int(prompt[0]))

    def rewind(self, state: LookupState, length: int) -> None:
        """Forget all tokens of the text from position `length` on."""
        for place in range(len(state.tokens) - 1, length - 1, -1):
            for gram in self._grams(state.tokens, place):
                state.behind[gram].pop()
                if not state.behind[gram]:
                    del state.behind[gram]
        del state.tokens[length:]

    def propose(
        self, state: LookupState, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """See `drafters.base.Drafter`. `out` is not read. Raises UserError where drafts are to be sampled."""
        if drawing is not None:
            raise UserError("prompt_lookup copies its drafts and cannot sample them; set the draft temperature to 0")
        for token in fresh.tolist() if state.tokens else [state.first, *fresh.tolist()]:
            for gram in self._grams(state.tokens, len(state.tokens)):
                state.behind.setdefault(gram, []).append(len(state.tokens))
            state.tokens.append(token)
        drafts = torch.tensor(self._found(state, plan.depth), dtype=torch.long, device=fresh.device)  # [N-1]
        return Tree(torch.cat([fresh[-1:], drafts]), torch.arange(-1, drafts.shape[0], device=fresh.device))

    def _found(self, state: LookupState, depth: int) -> list[int]:
        # A text's last n-grams are in `behind` only for earlier places, as nothing stands behind them yet.
        for gram in self._grams(state.tokens, len(state.tokens)):
            if gram in state.behind:
                place = state.behind[gram][0 if self.match == "first" else -1]
                return state.tokens[place : place + depth]
        return []

    def _grams(self, tokens: list[int], place: int) -> list[tuple[int, ...]]:
        """The n-grams that end before `place`, the longest first."""
        return [tuple(tokens[place - n : place]) for n in range(min(self.ngram, place), 0, -1)]
