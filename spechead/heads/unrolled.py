"""What heads that draft token after token share: who sees whom, how a tree grows, and the shape of a decoder layer.

Such a head feeds its own hidden states back. It is trained by unrolling that ("training-time test", "context
alignment"), so that training and drafting run the same code over the same inputs. Knows nothing of losses.

Legend: B batch, T rows, H hidden size, D draft vocabulary, N/G query/key heads, C head size, n positions, m rows
drafted before, S rows stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spechead.data.dataset import Batch
from spechead.decoding.grow import grow
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Tree
from spechead.heads.attention import CachedAttention, UnrolledAttention, causal_after
from spechead.heads.base import Head, ahead
from spechead.heads.layers import Attend
from spechead.target.cache import KVBuffer
from spechead.target.model import TargetOutput

# ------------------------------------------------------------------------------------------------ who sees whom


# ------------------------------------------------------------------------------------------------ the head


@dataclass
class DraftState:
    """What a head remembers of one text: keys and values of all committed rows, from the target's true features."""

    rows: list[KVBuffer] = field(default_factory=list)  # one for each decoder layer
    committed: int = 0  # rows that are committed; those behind are guesses of the last proposal


class UnrolledHead(Head):
    """Row t reads a hidden state of token t and the embedding of token t + 1, and predicts token t + 2.

    A subclass says what a true row starts from (`start`), how hidden states move on by one token (`advance`) and what
    they predict (`_log_probabilities`).
    """

    n_layers: int = 1  # decoder layers; each has its own keys and values
    recompute = False

    @property
    def scored_depth(self) -> int:
        """In training the unrolled steps; else, since more can be drafted, what the head's tree asks for."""
        return self.depths if self.training else self.tree.depth

    @abstractmethod
    def start(self, out: TargetOutput) -> Tensor:
        """Hidden states [B, T, H] of true rows."""

    @abstractmethod
    def advance(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Hidden states [B, T, H] one token further, given that token of each row; tokens and positions int64 [B, T].

        `attends` holds one attention pattern for each decoder layer.
        """

    @abstractmethod
    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        """Of the draft behind hidden states [n, H] that `advance` gave: [n, D]."""

    def unroll(self, batch: Batch, hidden: Tensor, steps: int, detach: bool = False) -> Iterator[Tensor]:
        """Hidden states [B, T, H] of draft after draft, from `start`'s on.

        At step s row t has read token t+1+s of the text and predicts token t+2+s. `detach`: the hidden state that a
        step starts from brings no gradient to the step before.
        """
        attends = [UnrolledAttention(batch.document) for _ in range(self.n_layers)]
        for step in range(steps):
            hidden = hidden.detach() if detach else hidden
            move = self._advance_twice if self.recompute else self.advance
            hidden = move(hidden, ahead(batch, 1 + step)[0], batch.positions + step, attends)
            yield hidden

    def _advance_twice(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: list[UnrolledAttention]
    ) -> Tensor:
        """`advance`, whose inner activations are not kept: the backward pass computes them again.

        Hidden states, keys and values are kept, since later steps read them.
        """

        def move(hidden: Tensor, before: list[UnrolledAttention]) -> tuple[Tensor, list[UnrolledAttention]]:
            after = [attend.fork() for attend in before]  # the second time must find them as the first did
            return self.advance(hidden, tokens, positions, after), after

        hidden, attends[:] = checkpoint(move, hidden, attends.copy(), use_reentrant=False, preserve_rng_state=False)
        return hidden

    def new_state(self, prompt: Tensor) -> DraftState:
        return DraftState([KVBuffer() for _ in range(self.n_layers)])

    @torch.no_grad()
    def propose(
        self, state: DraftState, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """Commit the rows of `fresh`, forget old guesses, and grow a tree behind the last row.

        The committed rows are made from the target's true features.
        """
        committed, new = state.committed, fresh.shape[0]
        for rows in state.rows:
            rows.crop(committed)
        visible = causal_after(committed, new, fresh.device)
        positions = torch.arange(committed, committed + new, device=fresh.device)
        hidden = self._draft(state, self.start(out), fresh, positions, visible)[:, -1:]  # [1, 1, H]
        state.committed = base = committed + new
        drafted = hidden[:, :0]  # [1, m, H] hidden states of the rows expanded so far

        def deepen(tokens: Tensor, parents: Tensor, own: Tensor) -> Tensor:
            nonlocal drafted
            before = torch.cat([drafted, hidden], 1)[:, parents]  # [1, n, H]; parent -1 is the last row
            depth = own.sum(-1)  # [n]: itself and its ancestors
            seen = torch.cat([own.new_ones(own.shape[0], base), own], 1)  # [n, S+n]
            after = self._draft(state, before, tokens, base - 1 + depth, seen)
            drafted = torch.cat([drafted, after], 1)
            return self._log_probabilities(after[0])

        first = self._log_probabilities(hidden[0])  # [1, D]
        return grow(plan, fresh[-1], first, self.draft_ids(), deepen, drawing, self.target.vocab_size)

    def _draft(self, state: DraftState, hidden: Tensor, tokens: Tensor, at: Tensor, visible: Tensor | None) -> Tensor:
        attends = [CachedAttention(rows, visible) for rows in state.rows]
        return self.advance(hidden, tokens[None], at[None], attends)


# ------------------------------------------------------------------------------------------------ decoder layers
