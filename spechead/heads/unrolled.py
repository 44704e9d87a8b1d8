"""The base of autoregressive heads, which feed their own hidden states back: EAGLE and EAGLE-3.

Training unrolls that loop ("training-time test", "context alignment"), so that training and drafting run the same code
over the same inputs.

Legend: B batch, T rows, H hidden size, D draft vocabulary, n positions, m rows drafted so far, S committed rows.
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


@dataclass
class HeadCache:
    """A head's KV cache for one sequence: committed rows, made from the target's true features."""

    rows: list[KVBuffer] = field(default_factory=list)  # one for each decoder layer
    committed: int = 0  # number of committed rows; later ones are drafts of the last proposal


class UnrolledHead(Head):
    """Row t reads a hidden state of token t and the embedding of token t + 1, and predicts token t + 2.

    A subclass defines the hidden states of true rows (`start`), the step to the next token (`advance`) and the draft
    distribution (`_log_probabilities`).
    """

    n_layers: int = 1  # decoder layers; each has its own keys and values
    recompute = False

    @property
    def scored_depth(self) -> int:
        """The unrolled steps in training; else the depth of the head's tree, since it can draft deeper than that."""
        return self.depths if self.training else self.tree.depth

    @abstractmethod
    def start(self, out: TargetOutput) -> Tensor:
        """Hidden states [B, T, H] of true rows."""

    @abstractmethod
    def advance(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Hidden states [B, T, H] one token later, given that token of each row; tokens and positions int64 [B, T].

        `attends`: one attention pattern for each decoder layer.
        """

    @abstractmethod
    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        """The draft distribution after hidden states that `advance` returned: [n, H] -> [n, D]."""

    def unroll(self, batch: Batch, hidden: Tensor, steps: int, detach: bool = False) -> Iterator[Tensor]:
        """Hidden states [B, T, H] of each drafting step; `hidden` [B, T, H] are those of `start`.

        At step s row t has read token t+1+s of the text and predicts token t+2+s. `detach`: no gradient flows from a
        step to the previous one.
        """
        attends = [UnrolledAttention(batch.document) for _ in range(self.n_layers)]
        for step in range(steps):
            hidden = hidden.detach() if detach else hidden
            advance = self._advance_recomputed if self.recompute else self.advance
            hidden = advance(hidden, ahead(batch, 1 + step)[0], batch.positions + step, attends)
            yield hidden

    def _advance_recomputed(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: list[UnrolledAttention]
    ) -> Tensor:
        """`advance` with gradient checkpointing: backward recomputes the inner activations.

        Hidden states, keys and values are kept, since later steps read them.
        """

        def advance(hidden: Tensor, before: list[UnrolledAttention]) -> tuple[Tensor, list[UnrolledAttention]]:
            after = [attend.fork() for attend in before]  # the recomputation must start from the same steps
            return self.advance(hidden, tokens, positions, after), after

        hidden, attends[:] = checkpoint(advance, hidden, attends.copy(), use_reentrant=False, preserve_rng_state=False)
        return hidden

    def new_state(self, prompt: Tensor) -> HeadCache:
        return HeadCache([KVBuffer() for _ in range(self.n_layers)])

    @torch.no_grad()
    def propose(
        self, state: HeadCache, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """Drop old drafts, commit the rows of `fresh` from the target's features, and grow a tree from the last."""
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
            before = torch.cat([drafted, hidden], 1)[:, parents]  # [1, n, H]; parent -1 is the last committed row
            depth = own.sum(-1)  # [n]: itself and its ancestors
            visible = torch.cat([own.new_ones(own.shape[0], base), own], 1)  # [n, S+n]
            after = self._draft(state, before, tokens, base - 1 + depth, visible)
            drafted = torch.cat([drafted, after], 1)
            return self._log_probabilities(after[0])

        first = self._log_probabilities(hidden[0])  # [1, D]
        return grow(plan, fresh[-1], first, self.draft_ids(), deepen, drawing, self.target.vocab_size)

    def _draft(
        self, state: HeadCache, hidden: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor | None
    ) -> Tensor:  # [1, n, H], [n], [n], [n, S+n] -> [1, n, H]
        attends = [CachedAttention(rows, visible) for rows in state.rows]
        return self.advance(hidden, tokens[None], positions[None], attends)
