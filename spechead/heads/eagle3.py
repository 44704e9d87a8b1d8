"""EAGLE-3 (arXiv 2503.01840): one decoder layer drafts autoregressively from fused features of three target layers.

Row t holds the fused feature of token t beside the embedding of token t+1 and predicts token t+2. Trained by unrolling
its own drafting ("training-time test"), so that training and drafting see the same inputs.

Legend: B batch, T rows, K tapped layers, H hidden size, D draft vocabulary, N/G query/key heads, C head size,
n positions, m rows drafted before, S rows stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spechead.cache import Rows
from spechead.dataset import Batch
from spechead.drafters.grow import grow
from spechead.errors import UserError
from spechead.heads.base import Head, Hits, ahead
from spechead.layers import Attend, Attention, GatedMLP, RMSNorm
from spechead.losses import hard_cross_entropy, soft_cross_entropy
from spechead.sampling import Drawing
from spechead.target import Target, TargetOutput
from spechead.tree import Plan, Tree


@dataclass
class Eagle3Config:
    """Shape and loss of the head; what is 0 or empty is taken from the target when the head is made."""

    layers: list[int] = field(default_factory=list)
    """Tapped layers, as indices into hidden_states; empty: low, middle and high = 2, L//2, L-3."""
    steps: int = 3
    """Unrolled drafting steps in training."""
    step_decay: float = 1.0
    """Step s's loss weighs decay^s."""
    draft_vocab_size: int = 8192
    """Rows of the output layer (the most frequent supervised tokens); 0 is the target's whole vocabulary."""
    loss: str = "soft_ce"
    """`soft_ce`: against the target's distribution over the draft vocabulary; `hard_ce`: against the text's token."""
    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 0.0
    rope_theta: float = 0.0


class _Layer(nn.Module):
    """The decoder layer: attention over [normed embedding; normed hidden], residual on the hidden state."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(
            2 * c.hidden_size,
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rope_theta,
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # [B, T, H]
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)  # [B, T, 2H]
        hidden = hidden + self.self_attn(x, positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class UnrolledAttention:
    """The attention pattern of training.

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
    """The attention pattern of drafting: new rows behind those in `rows`, of which they see what `visible` allows."""

    def __init__(self, rows: Rows, visible: Tensor) -> None:  # bool [n, S+n]
        self._rows, self._visible = rows, visible

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._rows.append(key, value)
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self._visible[None, None], enable_gqa=shared
        )


@dataclass
class Eagle3State:
    """What the head remembers of one text.

    Keys and values of all committed rows, made from the target's true features.
    """

    rows: Rows = field(default_factory=Rows)
    committed: int = 0  # rows that are committed; those behind are guesses of the last proposal


class Eagle3(Head):
    """The head: fusion, one decoder layer, output layer over the draft vocabulary."""

    kind = "eagle3"
    Config = Eagle3Config

    def __init__(self, config: Eagle3Config, target: Target) -> None:
        _resolve(config, target)
        super().__init__(config, target)
        self.layers = tuple(config.layers)
        self.depths = config.steps
        self.fc = nn.Linear(len(config.layers) * target.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, self.draft_size, bias=False)

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Output rows, final norm and last decoder layer start as the target's.

        The fusion passes the highest tap through.
        """
        target, layer = self.target, self.midlayer
        self.lm_head.weight.copy_(target.output_rows(self.draft_ids())[0])
        _copy(self.norm.weight, target.norm_weight(target.final_norm))
        self.fc.weight.normal_(std=0.01)
        self.fc.weight[:, -target.hidden_size :] += torch.eye(self.config.hidden_size, device=self.fc.weight.device)
        weights = dict(target.last_block.named_parameters())
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"):
            _copy(layer.get_parameter(f"{name}.weight"), weights.get(f"{name}.weight"))
        for name in ("q_proj", "k_proj", "v_proj"):  # the hidden half of [embedding; hidden]
            projection = layer.self_attn.get_parameter(f"{name}.weight")
            projection.normal_(std=0.01)
            _copy(projection[:, self.config.hidden_size :], weights.get(f"self_attn.{name}.weight"))
        for ours, theirs in (("hidden_norm", "input_layernorm"), ("post_attention_layernorm",) * 2):
            norm = getattr(target.last_block, theirs, None)
            _copy(layer.get_parameter(f"{ours}.weight"), target.norm_weight(norm))

    def training_step(self, batch: Batch, out: TargetOutput) -> tuple[Tensor, Hits]:
        """Unrolled drafting: at step s row t reads token t+1+s and predicts token t+2+s.

        Its hidden state is the last step's.
        """
        hidden = self.fc(out.features.to(self.dtype))  # [B, T, H]
        attend = UnrolledAttention(batch.document)
        loss = hidden.new_zeros((), dtype=torch.float32)
        correct = torch.zeros(self.config.steps, *batch.ids.shape, dtype=torch.bool, device=batch.ids.device)
        teacher = self._teacher(batch, out) if self.config.loss == "soft_ce" else None
        for step in range(self.config.steps):
            embedded = self.target.embed(ahead(batch, 1 + step)[0]).to(hidden.dtype)  # [B, T, H]
            hidden = self.midlayer(embedded, hidden, batch.positions + step, attend)
            ids, supervised = ahead(batch, 2 + step)
            labels, inside = self.to_draft(ids)
            rows = supervised & inside  # [B, T]
            logits = self.lm_head(self.norm(hidden[rows]))  # [n, D]
            weight = self.config.step_decay**step
            if teacher is None:
                loss = loss + weight * hard_cross_entropy(logits, labels[rows])
            else:
                loss = loss + weight * soft_cross_entropy(logits, teacher.behind(rows, 1 + step))
            correct[step][rows] = logits.detach().max(-1).indices == labels[rows]
        return loss, Hits(correct, ahead(batch, 2)[1])

    def _teacher(self, batch: Batch, out: TargetOutput) -> _Teacher:
        """The target's logits over the draft vocabulary, at the positions that predict a supervised token."""
        predicts = ahead(batch, 1)[1]  # [B, T]
        return _Teacher(predicts, self.target.logits(out.hidden[predicts], self.draft_ids()))

    def new_state(self, prompt: Tensor) -> Eagle3State:
        return Eagle3State()

    @torch.no_grad()
    def propose(
        self, state: Eagle3State, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """Commit the rows of `fresh`, forget old guesses, and grow a tree behind the last row.

        The committed rows are made from the target's true features.
        """
        committed, new = state.committed, fresh.shape[0]
        state.rows.crop(committed)
        visible = torch.ones(new, committed + new, dtype=torch.bool, device=fresh.device).tril(committed)
        positions = torch.arange(committed, committed + new, device=fresh.device)
        fused = self.fc(out.features.to(self.dtype))  # [1, n, H]
        hidden = self._draft(state, fused, fresh, positions, visible)[:, -1:]  # [1, 1, H]
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

    def _draft(self, state: Eagle3State, hidden: Tensor, tokens: Tensor, at: Tensor, visible: Tensor) -> Tensor:
        embedded = self.target.embed(tokens)[None].to(hidden.dtype)  # [1, n, H]
        return self.midlayer(embedded, hidden, at[None], CachedAttention(state.rows, visible))

    def _log_probabilities(self, hidden: Tensor) -> Tensor:  # [n, H] -> [n, D]
        return self.lm_head(self.norm(hidden)).float().log_softmax(-1)


class _Teacher:
    """The target's logits at the rows that predict a supervised token, looked up by rows further back."""

    def __init__(self, predicts: Tensor, logits: Tensor) -> None:  # bool [B, T]; [n, D]
        self._number = predicts.flatten().cumsum(0).view_as(predicts) - 1  # [B, T]
        self._logits = logits

    def behind(self, rows: Tensor, n: int) -> Tensor:
        """[n, D]: for each chosen row t (bool [B, T]) the target's logits at row t + n."""
        return self._logits[F.pad(self._number, (0, n))[:, n:][rows]]


def _copy(ours: Tensor, theirs: Tensor | None) -> None:
    """Take over a weight where the target has one of that shape."""
    if theirs is not None and theirs.shape == ours.shape:
        ours.copy_(theirs)


def _resolve(c: Eagle3Config, target: Target) -> None:
    """Fill in what the target decides, and refuse what cannot be built."""
    t, layers = target.config, target.n_layers
    c.layers = sorted(c.layers) or [2, layers // 2, layers - 3]
    if len(set(c.layers)) < len(c.layers) or min(c.layers) < 0 or max(c.layers) > layers:
        raise UserError(
            f"head.options.layers {c.layers}: needs distinct indices from 0 to {layers} "
            f"(the target has {layers} layers)"
        )
    if c.loss not in ("soft_ce", "hard_ce"):
        raise UserError(f"head.options.loss {c.loss!r} is not soft_ce or hard_ce")
    if c.hidden_size not in (0, target.hidden_size):
        raise UserError(f"head.options.hidden_size {c.hidden_size} differs from the target's {target.hidden_size}")
    c.hidden_size = target.hidden_size
    c.intermediate_size = c.intermediate_size or max(getattr(t, "intermediate_size", 0), c.hidden_size)
    c.num_attention_heads = c.num_attention_heads or t.num_attention_heads
    c.num_key_value_heads = c.num_key_value_heads or getattr(t, "num_key_value_heads", 0) or c.num_attention_heads
    c.head_dim = c.head_dim or getattr(t, "head_dim", None) or c.hidden_size // c.num_attention_heads
    c.rms_norm_eps = c.rms_norm_eps or getattr(t, "rms_norm_eps", 1e-5)
    c.rope_theta = c.rope_theta or target.rope_theta
