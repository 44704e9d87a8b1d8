"""EAGLE-3 (arXiv 2503.01840): a decoder layer drafts autoregressively from fused features of several target layers.

Row t reads the fused feature of token t along with the embedding of token t+1 and predicts token t+2. Training unrolls
the head's own drafting ("training-time test"), so that training and drafting see the same inputs. The norms of
EAGLE-3.1 are options. Tensor names are those that vLLM loads; additional layers are pre-norm decoder layers named
`layers.1` and so on.

Legend: B batch, T rows, H hidden size, D draft vocabulary, n positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.errors import UserError
from spechead.heads.base import Role, StepLoss
from spechead.heads.decoder_shape import DecoderShape, copy_if_same_shape, start_near_identity
from spechead.heads.draft_loss import DraftLoss
from spechead.heads.layers import Attend, GatedMLP, RMSNorm
from spechead.heads.losses import loss_named
from spechead.heads.unrolled import UnrolledHead
from spechead.options import Range
from spechead.target.model import Target, TargetOutput


@dataclass
class Eagle3Config(DecoderShape):
    """Shape and loss of the head; values that are 0 or empty are taken from the target when the head is built."""

    layers: Annotated[list[int], Role.MEANING] = field(default_factory=list)
    """Tapped layers, as indices into hidden_states; empty: low, middle and high = 2, L//2, L-3, or the inputs of the
    last three layers of a target with fewer than seven."""
    steps: Annotated[int, Range(1), Role.TRAINING] = 3
    """Unrolled drafting steps in training."""
    step_decay: Annotated[float, Range(0), Role.TRAINING] = 1.0
    """The weight of step s's loss is step_decay^s."""
    step_weights: Annotated[list[float], Range(0), Role.TRAINING] = field(default_factory=list)
    """One weight for each step, in place of the decay."""
    n_layers: Annotated[int, Range(1), Role.COUNT] = 1
    """Decoder layers; only the first reads the embedding."""
    draft_vocab_size: Annotated[int, Range(0), Role.SIZE] = 8192
    """Rows of the output layer (the most frequent supervised tokens); 0 is the target's whole vocabulary."""
    loss: Annotated[str, Role.TRAINING] = "soft_ce"
    """`soft_ce`: against the target's distribution over the draft vocabulary; `hard_ce`: against the text's token;
    `kl`, `tv`; `lk_alpha`, `lk_lambda`: the acceptance rate itself (arXiv 2602.23881). The last three read the target's
    whole output layer."""
    norm_before_residual: Annotated[bool, Role.MEANING] = False
    """The residual branches off after the hidden state is normed, not before."""
    norm_before_fc: Annotated[bool, Role.TENSORS] = False
    """A norm over the concatenated tapped features, before their fusion."""
    fc_norm: Annotated[bool, Role.TENSORS] = False
    """A norm over each of the tapped features, before their fusion (EAGLE-3.1)."""
    norm_output: Annotated[bool, Role.MEANING] = False
    """The next step reads the hidden state after the final norm, not before it (EAGLE-3.1)."""


class _Layer(nn.Module):
    """The first decoder layer: attention over [normed embedding; normed hidden], residual on the hidden state."""

    def __init__(self, c: Eagle3Config, target: Target) -> None:
        super().__init__()
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = c.attention(target, 2 * c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # [B, T, H]
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), normed], -1)  # [B, T, 2H]
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(x, positions, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(UnrolledHead):
    """Fusion, decoder layer(s), and an output layer over the draft vocabulary."""

    kind = "eagle3"
    title = "EAGLE-3"
    Config = Eagle3Config

    def __init__(self, config: Eagle3Config, target: Target) -> None:
        _resolve(config, target)
        super().__init__(config, target)
        self.taps = tuple(config.layers)
        self.depths = config.steps
        self.n_layers = config.n_layers
        taps, size, eps = len(config.layers), target.hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(taps))
        self.fc = nn.Linear(taps * size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, target)
        self.layers = nn.ModuleDict({str(i): config.decoder_layer(target) for i in range(1, config.n_layers)})
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, self.draft_size, bias=False)

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Copy the target's output rows, final norm and last decoder layer.

        The fusion starts close to the identity on the highest tap, additional layers close to the identity.
        """
        target, layer = self.target, self.midlayer
        self.lm_head.weight.copy_(target.output_rows(self.draft_ids())[0])
        copy_if_same_shape(self.norm.weight, target.norm_weight(target.final_norm))
        self.fc.weight.normal_(std=0.01)
        self.fc.weight[:, -target.hidden_size :] += torch.eye(self.config.hidden_size, device=self.fc.weight.device)
        weights = dict(target.last_block.named_parameters())
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"):
            copy_if_same_shape(layer.get_parameter(f"{name}.weight"), weights.get(f"{name}.weight"))
        for name in ("q_proj", "k_proj", "v_proj"):  # the hidden half of [embedding; hidden]
            projection = layer.self_attn.get_parameter(f"{name}.weight")
            projection.normal_(std=0.01)
            copy_if_same_shape(projection[:, self.config.hidden_size :], weights.get(f"self_attn.{name}.weight"))
        for name, source in (("hidden_norm", "input_layernorm"), ("post_attention_layernorm",) * 2):
            norm = getattr(target.last_block, source, None)
            copy_if_same_shape(layer.get_parameter(f"{name}.weight"), target.norm_weight(norm))
        for additional in self.layers.values():
            start_near_identity(additional, target)

    def start(self, out: TargetOutput) -> Tensor:
        features = out.features.to(self.dtype)  # [B, T, taps*H]
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = zip(self.fc_norm, features.chunk(len(self.taps), -1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], -1)
        return self.fc(features)

    def advance(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        hidden = self.midlayer(self.target.embed(tokens).to(hidden.dtype), hidden, positions, attends[0])
        for layer, attend in zip(self.layers.values(), attends[1:], strict=True):
            hidden = layer(hidden, positions, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """At step s row t reads token t+1+s and its own hidden state of the previous step, and predicts token t+2+s."""
        c = self.config
        draft_loss = DraftLoss(self, batch, out, loss_named(c.loss))
        loss = out.hidden.new_zeros((), dtype=torch.float32)
        for step, hidden in enumerate(self.unroll(batch, self.start(out), self.scored_depth)):  # [B, T, H]
            of_step = draft_loss.loss(step, hidden[draft_loss.rows[step]], self._logits)
            if step < c.steps:
                weight = c.step_weights[step] if c.step_weights else c.step_decay**step
                loss = loss + weight * of_step
        return StepLoss(loss, draft_loss.hits)

    def _logits(self, hidden: Tensor) -> Tensor:  # [n, H] -> [n, D]
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    def _log_probabilities(self, hidden: Tensor) -> Tensor:  # [n, H] -> [n, D]
        return self._logits(hidden).float().log_softmax(-1)


def _resolve(c: Eagle3Config, target: Target) -> None:
    """Fill in the values that the target decides. Raises UserError for a head that cannot be built."""
    layers = target.n_layers
    few = list(range(max(0, layers - 3), layers))  # a target so small has no distinct low, middle and high
    c.layers = sorted(c.layers) or ([2, layers // 2, layers - 3] if layers > 6 else few)
    if len(set(c.layers)) < len(c.layers) or min(c.layers) < 0 or max(c.layers) > layers:
        raise UserError(f"option head.options.layers: must be distinct indices from 0 to {layers}, got {c.layers}")
    if c.step_weights and len(c.step_weights) != c.steps:
        raise UserError(
            f"option head.options.step_weights: must be one for each of {c.steps} steps, got {c.step_weights}"
        )
    if c.step_weights and not any(c.step_weights):
        raise UserError(f"option head.options.step_weights: one must be above 0, got {c.step_weights}")
    if c.norm_before_fc and c.fc_norm:
        raise UserError(
            "option head.options.norm_before_fc: excludes fc_norm, which norms the same features; choose one"
        )
    loss_named(c.loss)
    c.fill(target)
