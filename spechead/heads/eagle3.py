"""EAGLE-3 (arXiv 2503.01840): one decoder layer drafts autoregressively from fused features of three target layers.

Row t holds the fused feature of token t beside the embedding of token t+1 and predicts token t+2. Trained by unrolling
its own drafting ("training-time test"), so that training and drafting see the same inputs.

Legend: B batch, T rows, K tapped layers, H hidden size, D draft vocabulary, n positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spechead.dataset import Batch
from spechead.errors import UserError
from spechead.heads.base import Hits, ahead
from spechead.heads.unrolled import DecoderShape, TrueRows, UnrolledHead, take_over
from spechead.layers import Attend, Attention, GatedMLP, RMSNorm
from spechead.losses import hard_cross_entropy, soft_cross_entropy
from spechead.target import Target, TargetOutput


@dataclass
class Eagle3Config(DecoderShape):
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


class Eagle3(UnrolledHead):
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
        take_over(self.norm.weight, target.norm_weight(target.final_norm))
        self.fc.weight.normal_(std=0.01)
        self.fc.weight[:, -target.hidden_size :] += torch.eye(self.config.hidden_size, device=self.fc.weight.device)
        weights = dict(target.last_block.named_parameters())
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"):
            take_over(layer.get_parameter(f"{name}.weight"), weights.get(f"{name}.weight"))
        for name in ("q_proj", "k_proj", "v_proj"):  # the hidden half of [embedding; hidden]
            projection = layer.self_attn.get_parameter(f"{name}.weight")
            projection.normal_(std=0.01)
            take_over(projection[:, self.config.hidden_size :], weights.get(f"self_attn.{name}.weight"))
        for ours, theirs in (("hidden_norm", "input_layernorm"), ("post_attention_layernorm",) * 2):
            norm = getattr(target.last_block, theirs, None)
            take_over(layer.get_parameter(f"{ours}.weight"), target.norm_weight(norm))

    def start(self, out: TargetOutput) -> Tensor:
        return self.fc(out.features.to(self.dtype))

    def advance(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        return self.midlayer(self.target.embed(tokens).to(hidden.dtype), hidden, positions, attends[0])

    def training_step(self, batch: Batch, out: TargetOutput) -> tuple[Tensor, Hits]:
        """Unrolled drafting: at step s row t reads token t+1+s and predicts token t+2+s.

        Its hidden state is the last step's.
        """
        loss = out.hidden.new_zeros((), dtype=torch.float32)
        correct = torch.zeros(self.config.steps, *batch.ids.shape, dtype=torch.bool, device=batch.ids.device)
        teacher = self._teacher(batch, out) if self.config.loss == "soft_ce" else None
        for step, hidden in enumerate(self.unroll(batch, self.start(out), self.config.steps)):  # [B, T, H]
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

    def _teacher(self, batch: Batch, out: TargetOutput) -> TrueRows:
        """The target's logits over the draft vocabulary, at the positions that predict a supervised token."""
        predicts = ahead(batch, 1)[1]  # [B, T]
        return TrueRows(predicts, self.target.logits(out.hidden[predicts], self.draft_ids()))

    def _log_probabilities(self, hidden: Tensor) -> Tensor:  # [n, H] -> [n, D]
        return self.lm_head(self.norm(hidden)).float().log_softmax(-1)


def _resolve(c: Eagle3Config, target: Target) -> None:
    """Fill in what the target decides, and refuse what cannot be built."""
    layers = target.n_layers
    c.layers = sorted(c.layers) or [2, layers // 2, layers - 3]
    if len(set(c.layers)) < len(c.layers) or min(c.layers) < 0 or max(c.layers) > layers:
        raise UserError(
            f"head.options.layers {c.layers}: needs distinct indices from 0 to {layers} "
            f"(the target has {layers} layers)"
        )
    if c.loss not in ("soft_ce", "hard_ce"):
        raise UserError(f"head.options.loss {c.loss!r} is not soft_ce or hard_ce")
    c.fill(target)
