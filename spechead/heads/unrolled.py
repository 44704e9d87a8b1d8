"""What heads that draft token after token share: who sees whom, how a tree grows, and the shape of a decoder layer.

Such a head feeds its own hidden states back. It is trained by unrolling that ("training-time test", "context
alignment"), so that training and drafting run the same code over the same inputs. Knows nothing of losses.

Legend: B batch, T rows, H hidden size, D draft vocabulary, N/G query/key heads, C head size, n positions, m rows
drafted before, S rows stored.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spechead.attention import grouped_attention
from spechead.cache import Rows
from spechead.dataset import Batch
from spechead.drafters.grow import grow
from spechead.errors import UserError
from spechead.heads.base import Head, Range, ahead, targets_size
from spechead.layers import Attend, Attention, DecoderLayer, GatedMLP, Rotary
from spechead.sampling import Drawing
from spechead.target import Target, TargetOutput
from spechead.tree import Plan, Tree

# ------------------------------------------------------------------------------------------------ who sees whom

_WEIGHTS_AT_ONCE = 1 << 24  # attention weights of a layer and step, over all heads: 64 MB in float32


class UnrolledAttention:
    """The attention pattern of training; one object for each decoder layer.

    Step 0 is causal; in step s row t sees the true rows up to t, then its own drafts.

        keys       step 0: rows 0..t       steps 1..s: row t only       (s = 2, row 2)
                   k0 k1 k2 .  .  .        k2'  k2''

    These are the keys of a real draft of depth s + 1 started behind row t: committed rows from true features, then the
    chain of its own guesses. Queries and keys of step s are rotated by position + s.

    Steps behind the first weigh keys one by one, since no kernel gives each row keys of its own. Where a layer's
    weights are many, they are made for a few rows at a time and once more in backward, so that memory grows with T and
    not with its square.
    """

    def __init__(self, document: Tensor) -> None:  # [B, T]
        same = (document[:, :, None] == document[:, None, :]) & (document[:, :, None] >= 0)
        allowed = same.tril() | torch.eye(document.shape[1], dtype=torch.bool, device=document.device)
        self._blocked = ~allowed[:, None]  # [B, 1, T, T]; padding sees itself, so that no row is empty
        self._keys: list[Tensor] = []  # each [B, N, T, C]
        self._values: list[Tensor] = []

    def fork(self) -> UnrolledAttention:
        """The same steps so far, and those to come apart."""
        other = copy(self)
        other._keys, other._values = self._keys.copy(), self._values.copy()
        return other

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        if len(self._keys) == 1:
            return F.scaled_dot_product_attention(query, self._keys[0], self._values[0], attn_mask=~self._blocked)
        batch, heads, width = query.shape[:3]
        rows = max(1, _WEIGHTS_AT_ONCE // (batch * heads * width))
        if rows >= width:
            return self._weigh(query, 0)
        parts = query.split(rows, 2)
        twice = partial(checkpoint, self._weigh, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([twice(part, i * rows, len(self._keys)) for i, part in enumerate(parts)], 2)

    def _weigh(self, query: Tensor, first: int, steps: int | None = None) -> Tensor:
        """What the rows from `first` on see in this step: query [B, N, t, C] -> [B, N, t, C].

        `steps`: how many steps that is; more may have been stored by the time that backward asks again.
        """
        rows = slice(first, first + query.shape[2])
        seen = slice(0, rows.stop)  # true rows behind are hidden from all of them
        scale = query.shape[-1] ** -0.5
        true = query @ self._keys[0][:, :, seen].transpose(2, 3) * scale  # [B, N, t, S]
        true = true.masked_fill(self._blocked[:, :, rows, seen], float("-inf"))
        own = [(query * k[:, :, rows]).sum(-1, keepdim=True) * scale for k in self._keys[1:steps]]  # each [B, N, t, 1]
        weights = torch.cat([true, *own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        width = seen.stop
        out = weights[..., :width] @ self._values[0][:, :, seen]  # [B, N, t, C]
        for i, v in enumerate(self._values[1:steps]):
            out = out + weights[..., width + i : width + i + 1] * v[:, :, rows]
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


def causal_behind(past: int, new: int, device: torch.device) -> Tensor | None:
    """What `new` rows of a text see behind `past` others, bool [n, S+n].

    None, causal without a mask, where there are no others: a prompt's rows need none of their number squared.
    """
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past) if past else None


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
    recompute = False

    @property
    def judged(self) -> int:
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
        visible = causal_behind(committed, new, fresh.device)
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

_SHARE = 0.01  # of what the target's last layer gives: its hidden states are far larger than normed ones


@dataclass
class DecoderShape:
    """Shape of a decoder layer; what is 0 is taken from the target when the head is made."""

    hidden_size: Annotated[int, Range(0)] = 0
    intermediate_size: Annotated[int, Range(0)] = 0
    num_attention_heads: Annotated[int, Range(0)] = 0
    num_key_value_heads: Annotated[int, Range(0)] = 0
    head_dim: Annotated[int, Range(0)] = 0
    rms_norm_eps: Annotated[float, Range(0)] = 0.0
    rope_theta: Annotated[float, Range(0)] = 0.0
    """Base of the rotary positions; 0: the target's, and its scaling unless one is given."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Scaling of the rotary positions as transformers writes it, such as {rope_type: linear, factor: 2}; with a
    `rope_theta` of its own, empty means none."""

    def fill(self, target: Target) -> None:
        """Take from the target what is 0. Raises UserError where its hidden size is not ours."""
        t = target.config
        self.hidden_size = targets_size(self.hidden_size, target)
        self.intermediate_size = self.intermediate_size or max(getattr(t, "intermediate_size", 0), self.hidden_size)
        self.num_attention_heads = self.num_attention_heads or t.num_attention_heads
        self.num_key_value_heads = (
            self.num_key_value_heads or getattr(t, "num_key_value_heads", 0) or self.num_attention_heads
        )
        self.head_dim = self.head_dim or getattr(t, "head_dim", None) or self.hidden_size // self.num_attention_heads
        self.rms_norm_eps = self.rms_norm_eps or getattr(t, "rms_norm_eps", 1e-5)
        if not self.rope_theta:
            self.rope_theta, self.rope_scaling = target.rope_theta, self.rope_scaling or target.rope_scaling

    def attention(self, target: Target, inputs: int, bias: bool = False) -> Attention:
        """Over `inputs` features. Raises UserError where heads do not share keys evenly, or positions cannot turn."""
        self._refuse_unbuildable()
        positions = Rotary.plain(self.head_dim, self.rope_theta)
        if self.rope_scaling:
            positions = Rotary(*target.rotary_frequencies(self.head_dim, self.rope_theta, self.rope_scaling))
        heads = self.num_attention_heads, self.num_key_value_heads
        return Attention(inputs, self.hidden_size, *heads, self.head_dim, positions, bias)

    def _refuse_unbuildable(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"head.options.num_attention_heads {self.num_attention_heads}: is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(
                f"head.options.head_dim {self.head_dim}: must be even and above 0, since positions turn pairs; where "
                "neither it nor the target says, it is hidden_size / num_attention_heads"
            )
        for name, value in self.rope_scaling.items():
            numbers = value if isinstance(value, list) else [value]
            if name.endswith("factor") and value is not None and not all(map(_above_zero, numbers)):
                raise UserError(f"head.options.rope_scaling: {name} must be above 0, got {value}")

    def decoder_layer(self, target: Target, *, first_norm: bool = True, bias: bool = False) -> DecoderLayer:
        """An ordinary one of this shape."""
        attention = self.attention(target, self.hidden_size, bias)
        mlp = GatedMLP(self.hidden_size, self.intermediate_size)
        return DecoderLayer(attention, mlp, self.hidden_size, self.rms_norm_eps, first_norm)


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def take_over(ours: Tensor, theirs: Tensor | None) -> None:
    """Copy a weight where the target has one of that shape."""
    if theirs is not None and theirs.shape == ours.shape:
        ours.copy_(theirs)


def start_near_identity(layer: DecoderLayer, target: Target) -> None:
    """Start as the target's last layer where shapes allow, its outputs made small."""
    weights = dict(target.last_block.named_parameters())
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            theirs = target.norm_weight(getattr(target.last_block, name.removesuffix(".weight"), None))
        else:
            theirs = weights.get(name)
        take_over(parameter, theirs)
    layer.self_attn.o_proj.weight.mul_(_SHARE)
    layer.mlp.down_proj.weight.mul_(_SHARE)
