"""A smaller model with the target's tokenizer drafts for it (speculative decoding, arXiv 2211.17192, 2302.01318).

The draft model has its own cache, which follows the committed tokens; its drafts are dropped from it after each pass.

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
    """The draft model's state of one sequence."""

    first: Tensor  # int64 [1] the first token, which `fresh` never contains
    text: Tensor  # int64 [committed], kept for draft models that may have to read it again
    cache: KVCache = field(default_factory=KVCache)
    committed: int = 0  # tokens of the sequence so far; rows of the cache after them are drafts


class DraftModel:
    """Drafts with `draft`, a model of the same tokenizer as `target`.

    Vocabularies may be padded to different sizes: ids that only one model has are never drafted, nor are positions
    beyond the draft model's. Raises UserError where the tokenizers differ.
    """

    taps: Sequence[int] = ()
    branches = True

    def __init__(self, target: Target, draft: Target) -> None:
        check_same_tokenizer(target, draft)
        self.target, self.draft = target, draft
        self.tree: Plan = chain(4)
        self.common = min(target.vocab_size, draft.vocab_size)  # D

    def new_state(self, prompt: Tensor) -> DraftState:  # int64 [P]
        return DraftState(prompt[:1], prompt[:0])

    def rewind(self, state: DraftState, length: int) -> None:
        """Drop all tokens from position `length` on."""
        state.committed = min(state.committed, length)

    @torch.no_grad()
    def propose(
        self, state: DraftState, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """See `drafters.base.Drafter`. `out` is not used: the draft model reads tokens only."""
        unread, room = self.commit(state, fresh)
        if room < 1:
            return Tree.root(fresh[-1:])
        first = self.log_probabilities(self.read(state.cache, unread)[-1:])  # [1, D]
        nodes = _Nodes(self, state)
        return grow(plan.limited(room), fresh[-1], first, None, nodes, drawing, self.target.vocab_size)

    def commit(self, state: DraftState, fresh: Tensor) -> tuple[Tensor, int]:
        """Drop the drafts of the last proposal and append `fresh` to the sequence.

        Returns the tokens that the draft model has not read yet, and the number of positions left for drafts.
        """
        unread = fresh if state.committed else torch.cat([state.first, fresh])
        known = state.committed
        state.cache.crop(known)
        state.committed += unread.shape[0]
        if self.draft.rotary_border is not None:
            state.text = torch.cat([state.text[:known], unread])
            if self.draft.outgrows(known, state.committed):
                unread = unread[-1:]
                state.cache.crop(0)
                self.read(state.cache, state.text)
                state.cache.crop(state.committed - 1)
        return unread, self.draft.max_positions - state.committed

    def read(
        self, cache: KVCache, tokens: Tensor, positions: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [T, H] of tokens int64 [T] after the cache; `positions` [T], `visible` bool [T, T]."""
        ids = tokens.where(tokens < self.draft.vocab_size, 0)  # any token stands for an id without an embedding
        positions = None if positions is None else positions[None]
        visible = None if visible is None else visible[None]
        return self.draft.forward(ids[None], cache=cache, positions=positions, visible=visible).hidden[0]

    def log_probabilities(self, hidden: Tensor) -> Tensor:  # [n, H] -> float32 [n, D]
        return self.draft.logits(hidden)[:, : self.common].log_softmax(-1)


class _Nodes:
    """Reads the nodes that `grow` expands, level by level: one forward of the draft model for each level.

    New tokens see all of the cache. This is right for a chain, where each node is a descendant of all nodes before it.
    Once a level has branched, its nodes must not see each other's children, so that the whole tree is read again at
    each level.
    """

    def __init__(self, drafter: DraftModel, state: DraftState) -> None:
        self._drafter, self._cache, self._committed = drafter, state.cache, state.committed
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
            self._cache.crop(self._committed)
            positions = self._committed - 1 + self._visible.sum(-1)  # [m+n]; a node sees itself and its ancestors
            hidden = self._drafter.read(self._cache, self._tokens, positions, self._visible)
        return self._drafter.log_probabilities(hidden[-new:])


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """Raise UserError unless every id that both tokenizers use is the same token; either may have added tokens."""
    tokenizers = target.tokenizer, draft.tokenizer
    if tokenizers[0] is tokenizers[1]:
        return
    a, b = (tokenizer.get_vocab() for tokenizer in tokenizers)  # each: token -> id
    shared = set(a.values()) & set(b.values())
    added = {token for tokenizer in tokenizers for token in tokenizer.get_added_vocab()}
    for token, number in sorted(a.items() ^ b.items(), key=lambda item: item[1]):
        if number in shared or (token in a and token in b) or token not in added:
            raise UserError(
                f"target {target.name!r} and draft model {draft.name!r} have different tokenizers: {token!r} is "
                f"{a.get(token, 'no token')} in one, {b.get(token, 'no token')} in the other"
            )
