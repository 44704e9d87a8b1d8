"""A smaller model with the target's tokenizer drafts for it (speculative decoding, arXiv 2211.17192, 2302.01318).

The draft model keeps a cache of its own in step with the text: what was committed is read, guesses are forgotten.
Knows nothing of how a draft is verified.

Legend: P prompt tokens, n tokens just committed or nodes expanded at a level, m nodes expanded before, T tokens read at
once, H hidden size of the draft model, D token ids that both models know, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.decoding.grow import grow
from spechead.decoding.tree import Plan, Tree, chain
from spechead.drafters.base import Drawing
from spechead.errors import UserError
from spechead.target.cache import KVCache
from spechead.target.model import Target, TargetOutput


@dataclass
class DraftState:
    """What the draft model remembers of one text."""

    first: Tensor  # int64 [1] the text's first token, which `fresh` never brings
    cache: KVCache = field(default_factory=KVCache)
    committed: int = 0  # tokens of the text so far; rows of the cache behind them are guesses


class DraftModel:
    """Drafts with `draft`, a model of the same tokenizer as `target`.

    The two may differ in how far they pad their vocabularies: ids that only one of them has are never drafted. Nothing
    is drafted at positions that the draft model does not have. Raises UserError where the tokenizers differ.
    """

    taps: Sequence[int] = ()
    branches = True

    def __init__(self, target: Target, draft: Target) -> None:
        check_same_tokenizer(target, draft)
        self.target, self.draft = target, draft
        self.tree: Plan = chain(4)
        self.common = min(target.vocab_size, draft.vocab_size)  # D

    def new_state(self, prompt: Tensor) -> DraftState:  # int64 [P]
        return DraftState(prompt[:1])

    def rewind(self, state: DraftState, length: int) -> None:
        """Forget all tokens of the text from position `length` on."""
        state.committed = min(state.committed, length)

    @torch.no_grad()
    def propose(
        self, state: DraftState, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """See `drafters.base.Drafter`. `out` is not read: the draft model sees tokens alone."""
        unread, room = self.commit(state, fresh)
        if room < 1:
            return Tree.root(fresh[-1:])
        first = self.log_probabilities(self.read(state.cache, unread)[-1:])  # [1, D]
        nodes = _Nodes(self, state)
        return grow(plan.limited(room), fresh[-1], first, None, nodes, drawing, self.target.vocab_size)

    def commit(self, state: DraftState, fresh: Tensor) -> tuple[Tensor, int]:
        """Forget the guesses of the last proposal, take `fresh` into the text.

        Returns the tokens that the draft model has yet to read, and how many drafts have a position behind them.
        """
        unread = fresh if state.committed else torch.cat([state.first, fresh])
        state.cache.crop(state.committed)
        state.committed += unread.shape[0]
        return unread, self.draft.max_positions - state.committed

    def read(
        self, cache: KVCache, tokens: Tensor, positions: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [T, H] of tokens int64 [T] behind the cache; `positions` [T], `visible` bool [T, T]."""
        known = tokens.where(tokens < self.draft.vocab_size, 0)  # whatever stands for an id that it has no row for
        at = None if positions is None else positions[None]
        seen = None if visible is None else visible[None]
        return self.draft.forward(known[None], cache=cache, positions=at, visible=seen).hidden[0]

    def log_probabilities(self, hidden: Tensor) -> Tensor:  # [n, H] -> float32 [n, D]
        return self.draft.logits(hidden)[:, : self.common].log_softmax(-1)


class _Nodes:
    """Reads the nodes that `grow` expands, level by level: one forward of the draft model a level.

    New tokens see all of the cache. The nodes of a chain may: each lies behind all nodes before it. Once a level has
    branched, its nodes must not see each other's children, so from then on the whole tree is read anew at each level.
    """

    def __init__(self, drafter: DraftModel, state: DraftState) -> None:
        self._drafter, self._cache, self._text = drafter, state.cache, state.committed
        self._tokens = state.first[:0]  # int64 [m]
        self._visible = torch.zeros(0, 0, dtype=torch.bool, device=state.first.device)  # [m, m]
        self._levels = 0

    def __call__(self, tokens: Tensor, parents: Tensor, visible: Tensor) -> Tensor:
        """The signature of `grow.Deepen`."""
        new = tokens.shape[0]
        self._levels += 1
        self._tokens = torch.cat([self._tokens, tokens])  # [m+n]
        self._visible = torch.cat([F.pad(self._visible, (0, new)), visible])  # [m+n, m+n]
        if self._tokens.shape[0] == self._levels:  # one node at each level: a chain
            hidden = self._drafter.read(self._cache, tokens)
        else:
            self._cache.crop(self._text)
            positions = self._text - 1 + self._visible.sum(-1)  # [m+n]; a node sees itself and its ancestors
            hidden = self._drafter.read(self._cache, self._tokens, positions, self._visible)
        return self._drafter.log_probabilities(hidden[-new:])


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """Raise UserError unless every id that both tokenizers use is the same token; either may have added some beyond."""
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is theirs:
        return
    a, b = ours.get_vocab(), theirs.get_vocab()  # each: token -> id
    used, added = set(a.values()) & set(b.values()), {*ours.get_added_vocab(), *theirs.get_added_vocab()}
    for token, number in sorted(a.items() ^ b.items(), key=lambda item: item[1]):
        if number in used or (token in a and token in b) or token not in added:
            raise UserError(
                f"target {target.name!r} and draft model {draft.name!r} have different tokenizers: {token!r} is "
                f"{a.get(token, 'no token')} in one, {b.get(token, 'no token')} in the other"
            )
