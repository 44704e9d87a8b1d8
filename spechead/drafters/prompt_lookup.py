"""Draft from the text itself: the tokens that followed an earlier occurrence of its last n-gram.

The matching is that of prompt lookup decoding (2023; transformers' `prompt_lookup_num_tokens`). It needs no model, and
its cost does not grow with the text. An end-of-sequence token is drafted like any other.

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
LONGEST = 16  # tokens of an n-gram; each token of the text costs that many look-ups


@dataclass
class LookupState:
    """The tokens of one sequence, and the places that follow each n-gram in it."""

    first: int  # the first token, which `fresh` never contains
    tokens: list[int] = field(default_factory=list)
    following: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # ascending


class PromptLookup:
    """Looks for the last `ngram` tokens, then for fewer, down to one; drafts what followed the longest match.

    `match` selects among several places: the `first` (as transformers does), or the `latest`. The draft is a chain as
    deep as the plan, shorter at the end of the text, and the root alone without a match. Copied drafts have no
    probability, so that a plan's floor has no effect. Raises UserError for other values.
    """

    taps: Sequence[int] = ()
    branches = False

    def __init__(self, ngram: int = 3, match: str = "first") -> None:
        if not 1 <= ngram <= LONGEST:
            raise UserError(f"option drafter: ngram of prompt_lookup must be from 1 to {LONGEST}, got {ngram}")
        if match not in MATCHES:
            raise UserError(f"option drafter: match of prompt_lookup must be {' or '.join(MATCHES)}, got {match!r}")
        self.tree: Plan = chain(10)
        self.ngram, self.match = ngram, match

    def new_state(self, prompt: Tensor) -> LookupState:  # int64 [P]
        return LookupState(int(prompt[0]))

    def rewind(self, state: LookupState, length: int) -> None:
        """Drop all tokens from position `length` on."""
        for place in range(len(state.tokens) - 1, length - 1, -1):
            for gram in self._grams(state.tokens, place):
                state.following[gram].pop()
                if not state.following[gram]:
                    del state.following[gram]
        del state.tokens[length:]

    def propose(
        self, state: LookupState, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """See `drafters.base.Drafter`. `out` is not used. Raises UserError where drafts are to be sampled."""
        if drawing is not None:
            raise UserError("option draft_temperature: prompt_lookup cannot sample its drafts; set it to 0")
        for token in fresh.tolist() if state.tokens else [state.first, *fresh.tolist()]:
            for gram in self._grams(state.tokens, len(state.tokens)):
                state.following.setdefault(gram, []).append(len(state.tokens))
            state.tokens.append(token)
        drafts = torch.tensor(self._continuation(state, plan.depth), dtype=torch.long, device=fresh.device)  # [N-1]
        return Tree(torch.cat([fresh[-1:], drafts]), torch.arange(-1, drafts.shape[0], device=fresh.device))

    def _continuation(self, state: LookupState, depth: int) -> list[int]:
        # The last n-grams of the text are in `following` only for earlier places: nothing follows them yet.
        for gram in self._grams(state.tokens, len(state.tokens)):
            if gram in state.following:
                place = state.following[gram][0 if self.match == "first" else -1]
                return state.tokens[place : place + depth]
        return []

    def _grams(self, tokens: list[int], place: int) -> list[tuple[int, ...]]:
        """The n-grams that end before `place`, the longest first."""
        return [tuple(tokens[place - n : place]) for n in range(min(self.ngram, place), 0, -1)]
