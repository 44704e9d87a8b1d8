"""Staged speculative decoding (arXiv 2308.04623): tiny drafts for the middle model, which drafts for the target.

A draft model needs one forward for each draft. Here a cheaper drafter drafts for it, so that one forward of the draft
model yields several drafts, the same that it would have drafted alone.

Legend: P prompt tokens, n tokens that the middle has not read yet, N nodes of tiny's tree, D ids that middle and target
share, V the target's vocabulary, K drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spechead.decoding.tree import Plan, Tree
from spechead.drafters.base import Drafter, Drawing
from spechead.drafters.draft_model import DraftModel, DraftState
from spechead.target.cache import KVCache
from spechead.target.model import TargetOutput


class Tiny(Drafter, Protocol):
    """A drafter that reads tokens only, never `out`, and can drop them again: the middle's tokens are drafts."""

    def rewind(self, state: Any, length: int) -> None:
        """Drop all tokens from position `length` on."""


@dataclass
class StagedState:
    """The state of both drafters for one sequence."""

    middle: DraftState
    tiny: Any


class Staged:
    """Drafts the chain that `middle` would, as deep as the plan; `tiny` drafts for `middle` by its own plan.

    With `drawing` the chain is the middle's own draw, as if drawn token by token: tiny determines how many drafts one
    forward yields, not which.
    """

    taps: Sequence[int] = ()
    branches = False

    def __init__(self, middle: DraftModel, tiny: Tiny) -> None:
        self.middle, self.tiny = middle, tiny
        self.tree: Plan = middle.tree

    def new_state(self, prompt: Tensor) -> StagedState:  # int64 [P]
        return StagedState(self.middle.new_state(prompt), self.tiny.new_state(prompt))

    @torch.no_grad()
    def propose(
        self, state: StagedState, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """See `drafters.base.Drafter`."""
        middle, cache = self.middle, state.middle.cache
        self.tiny.rewind(state.tiny, state.middle.committed)
        unread, room = middle.commit(state.middle, fresh)
        chain = _Chain(min(plan.depth, room), plan.floor, drawing)
        unseen = fresh  # tokens that tiny has not read yet
        if not chain.ended and not cache.length:  # without a mask, whose size is quadratic in the prompt
            middle.read(cache, unread)  # with the last token, since rotary factors may depend on the length
            cache.crop(unread.shape[0] - 1)
            unread = unread[-1:]
        while not chain.ended:
            left = chain.depth - len(chain.tokens) - 1  # useful drafts: the middle adds a token of its own
            if left or not chain.tokens:  # tiny must read committed tokens; it would only drop further drafts
                guess = self.tiny.propose(state.tiny, unseen, out, self.tiny.tree.limited(max(1, left))).pruned(left)
            else:
                guess = Tree.root(unseen[-1:])
            width = cache.length + unread.shape[0] - 1
            path = chain.follow(guess, self._verify(cache, unread, guess))
            cache.keep([path], width)
            unseen = torch.tensor(chain.tokens[-len(path) :], device=fresh.device)
            unread = unseen[-1:]  # the others were drafts of tiny, which the middle has read
        return chain.tree(fresh[-1:], self.middle.target.vocab_size)

    def _verify(self, cache: KVCache, unread: Tensor, guess: Tree) -> Tensor:
        """The middle's log-probabilities [N, D] after the nodes of `guess`, whose root is the last of `unread` [n]."""
        before, width = unread.shape[0] - 1, unread.shape[0] - 1 + len(guess)
        tokens = torch.cat([unread[:-1], guess.tokens])  # [n-1+N]
        if len(guess) == 1:
            return self.middle.log_probabilities(self.middle.read(cache, tokens)[-1:])
        visible = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
        visible[before:, before:] = guess.visible
        positions = cache.length + visible.sum(-1) - 1  # a token sees itself and all before it
        return self.middle.log_probabilities(self.middle.read(cache, tokens, positions, visible)[before:])


class _Chain:
    """The middle's chain while it grows: its tokens, and the distributions they were drawn from."""

    def __init__(self, depth: int, floor: float, drawing: Drawing | None) -> None:
        self.depth = depth
        self.tokens: list[int] = []
        self._sources: list[Tensor] = []  # each [D]
        self._floor = math.log(floor) if floor else -math.inf
        self._drawing = drawing
        self._likelihood = 0.0  # log-probability of the tokens

    @property
    def ended(self) -> bool:
        return len(self.tokens) >= self.depth or self._likelihood < self._floor

    def follow(self, guess: Tree, logp: Tensor) -> list[int]:
        """Append the middle's own tokens, given its log-probabilities [N, D] after the nodes of `guess`, as long as a
        node has that token, and one more. Returns the nodes followed, the root first."""
        places = zip(guess.parents.tolist(), guess.tokens.tolist(), strict=True)
        children = {place: node for node, place in enumerate(places)}
        best, likelihoods = (values.tolist() for values in logp.max(-1)[::-1])
        path: list[int] = []
        node: int | None = 0
        while node is not None and not self.ended:
            path.append(node)
            if self._drawing is None:
                token, likelihood = best[node], likelihoods[node]
            else:
                token, likelihood = self._draw(logp[node : node + 1], self._drawing)
            self.tokens.append(token)
            self._likelihood += likelihood
            node = children.get((node, token))
        return path

    def _draw(self, logp: Tensor, drawing: Drawing) -> tuple[int, float]:  # [1, D] -> token, its log-probability
        ids, q = drawing.draw(logp, 1)
        token = int(ids)
        self._sources.append(q[0])
        return token, math.log(float(q[0, token]))

    def tree(self, root: Tensor, vocabulary: int) -> Tree:
        """The chain after `root` int64 [1]."""
        device = root.device
        tokens = torch.cat([root, torch.tensor(self.tokens, dtype=torch.long, device=device)])  # [1+K]
        tree = Tree(tokens, torch.arange(-1, len(self.tokens), device=device))
        if self._drawing is not None:
            tree.drawn_from = torch.zeros(len(tree), vocabulary, device=device)
            for node, q in enumerate(self._sources):
                tree.drawn_from[node, : q.shape[0]] = q
        return tree
