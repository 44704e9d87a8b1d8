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
import torch.nn.functional as F
from torch import Tensor

from spechead.attention import grouped_attention
from spechead.cache import Rows
from spechead.dataset import Batch
from spechead.drafters.grow import grow
from spechead.errors import UserError
from spechead.heads.base import Head, ahead
from spechead.layers import Attend
from spechead.sampling import Drawing
from spechead.target import Target, TargetOutput
from spechead.tree import Plan, Tree

# ------------------------------------------------------------------------------------------------ who sees whom


class UnrolledAttention:
    """The attention pattern of training; one object for each decoder layer.

    Step 0 is causal; in step s row t sees the true rows up to t, then its own drafts.

        keys       step 0: rows 0..t       steps 1..s: row t only       (s = 2, row 2)
                   k0 k1 k2 .  .  .        k2'  k2''

    These are the keys of a real draft of depth s + 1 started behind row t: committed rows from true features, then the
    chain of its own guesses. Queries and keys of step s are rotated by position + s.
    """

    def __init__(self, document: Tensor) -> None:  # [B, T]
        same = (document[:, :, None] == document[:, None, :]) & (document[:, :, None] >= 0)
        allowed = same.tril() | torch.eye(document.shape[1], dtype=torch.bool, device=document.device)
        self._blocked = ~allowed[:, None]  # [B, 1, T, T]; padding sees itself, so that no row is empty
        self._keys: list[Tensor] = []  # each [B, N, T, C]
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        if len(self._keys) == 1:
            return F.scaled_dot_product_attention(query, self._keys[0], self._values[0], attn_mask=~self._blocked)
        scale = query.shape[-1] ** -0.5
        true = (query @ self._keys[0].transpose(2, 3) * scale).masked_fill(self._blocked, float("-inf"))
        own = [(query * k).sum(-1, keepdim=True) * scale for k in self._keys[1:]]  # each [B, N, T, 1]
        weights = torch.cat([true, *own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        width = query.shape[2]
        out = weights[..., :width] @ self._values[0]  # [B, N, T, C]
        for i, v in enumerate(self._values[1:]):
            out = out + weights[..., width + i : width + i + 1] * v
        return out


class CachedAttention:
    """The attention pattern of drafting: new rows behind those in `rows`, of which they see what `visible` allows.

    `visible` bool [n, S+n]; None where `rows` is empty: the new rows are causal.
    """

    def __init__(self, rows: Rows, visible: Tensor | None) -> None:
        self._rows, self._visible = rows, visible

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._rows.append(key, value)
        if self._visible is None:
            return grouped_attention(query, keys, values, None, causal=True)
        return grouped_attention(query, keys, values, self._visible[None, None])


# ------------------------------------------------------------------------------------------------ the head


@dataclass
class DraftState:
    """What a head remembers of one text: keys and values of all committed rows, from the target's true features."""

    rows: list[Rows] = field(default_factory=list)  # one for each decoder layer
    committed: int = 0  # rows that are committed; those behind are guesses of the last proposal


class UnrolledHead(Head):
    """Row t reads a hidden state of token t and the embedding of token t + 1, and predicts token t + 2.

    A subclass says what a true row starts from (`start`), how hidden states move on by one token (`advance`) and what
    they predict (`_log_probabilities`).
    """

    n_layers: int = 1  # decoder layers; each has its own keys and values

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
            hidden = self.advance(hidden, ahead(batch, 1 + step)[0], batch.positions + step, attends)
            yield hidden

    def new_state(self, prompt: Tensor) -> DraftState:
        return DraftState([Rows() for _ in range(self.n_layers)])

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
        visible = None  # a prompt's rows need no mask of their number squared
        if committed:
            visible = torch.ones(new, committed + new, dtype=torch.bool, device=fresh.device).tril(committed)
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


class TrueRows:
    """Values of the rows that predict a supervised token, looked up from rows further back."""

    def __init__(self, predicts: Tensor, values: Tensor) -> None:  # bool [B, T]; [n, ...]
        self._number = predicts.flatten().cumsum(0).view_as(predicts) - 1  # [B, T]
        self._values = values

    def behind(self, rows: Tensor, n: int) -> Tensor:
        """[n, ...]: for each chosen row t (bool [B, T]) the value of row t + n."""
        return self._values[F.pad(self._number, (0, n))[:, n:][rows]]


# ------------------------------------------------------------------------------------------------ decoder layers


@dataclass
class DecoderShape:
    """Shape of a decoder layer; what is 0 is taken from the target when the head is made."""

    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 0.0
    rope_theta: float = 0.0

    def fill(self, target: Target) -> None:
        """Take from the target what is 0. Raises UserError where its hidden size is not ours."""
        t = target.config
        if self.hidden_size not in (0, target.hidden_size):
            raise UserError(
                f"head.options.hidden_size {self.hidden_size} differs from the target's {target.hidden_size}"
            )
        self.hidden_size = target.hidden_size
        self.intermediate_size = self.intermediate_size or max(getattr(t, "intermediate_size", 0), self.hidden_size)
        self.num_attention_heads = self.num_attention_heads or t.num_attention_heads
        self.num_key_value_heads = (
            self.num_key_value_heads or getattr(t, "num_key_value_heads", 0) or self.num_attention_heads
        )
        self.head_dim = self.head_dim or getattr(t, "head_dim", None) or self.hidden_size // self.num_attention_heads
        self.rms_norm_eps = self.rms_norm_eps or getattr(t, "rms_norm_eps", 1e-5)
        self.rope_theta = self.rope_theta or target.rope_theta


def take_over(ours: Tensor, theirs: Tensor | None) -> None:
    """Copy a weight where the target has one of that shape."""
    if theirs is not None and theirs.shape == ours.shape:
        ours.copy_(theirs)
