"""EAGLE (arXiv 2401.15077): a decoder layer that predicts the target's next feature, read by the target's output layer.

The feature is the target's last hidden state, the input of its output layer. Row t reads feature t along with the
embedding of token t+1 and predicts feature t+1, hence token t+2. Embedding and output layer are the target's, frozen,
and not in the head's file. EAGLE-2 (arXiv 2406.16858) is the same head with a dynamic tree, the default here. HASS
(arXiv 2408.15766) is a set of options: `steps` of unrolled drafting in training, and `topk_weight`.

The layer is llama's: rotary positions, scaled as the target's are; RMS norms, but none before the first layer's
attention; gated MLP; any head size and number of key/value heads; biases on queries, keys and values if the target has
them. Tensor names are those that vLLM and the EAGLE project load.

Legend: B batch, T rows, H hidden size, D draft vocabulary, n positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.decoding.tree import Dynamic
from spechead.errors import UserError
from spechead.heads.base import Role, StepLoss, ahead, noise_generator
from spechead.heads.decoder_shape import DecoderShape
from spechead.heads.draft_loss import DraftLoss, TeacherRows
from spechead.heads.layers import Attend
from spechead.heads.losses import Loss, feature_regression, soft_cross_entropy, topk_distillation
from spechead.heads.unrolled import UnrolledHead
from spechead.options import Range
from spechead.target.model import Target, TargetOutput

_SAMPLED_EMBEDDINGS = 4096  # tokens, to estimate the size of all embeddings


@dataclass
class EagleConfig(DecoderShape):
    """Shape and loss of the head."""

    n_layers: Annotated[int, Range(1), Role.COUNT] = 1
    """Decoder layers; servers expect one."""
    fc_bias: Annotated[bool, Role.TENSORS] = False
    """A bias in the fusion of embedding and feature; the EAGLE project has one, vLLM supports none."""
    attention_bias: Annotated[bool | None, Role.TENSORS] = None
    """Biases on queries, keys and values; unset: as in the target."""
    draft_vocab_size: Annotated[int, Range(0), Role.SIZE] = 0
    """Rows of the target's output layer that are used (the most frequent supervised tokens; FR-Spec, arXiv 2502.14856);
    0 is its whole vocabulary."""
    feature_weight: Annotated[float, Range(0), Role.TRAINING] = 1.0
    """Weight of the feature regression (smooth L1)."""
    logit_weight: Annotated[float, Range(0), Role.TRAINING] = 0.1
    """Weight of the cross-entropy against the target's distribution."""
    topk_weight: Annotated[float, Range(0), Role.TRAINING] = 0.0
    """Weight of the cross-entropy over the target's `topk` likeliest tokens alone; HASS: 1."""
    topk: Annotated[int, Range(1), Role.TRAINING] = 10
    """The number of these tokens."""
    noise: Annotated[float, Range(0), Role.TRAINING] = 0.1
    """Uniform noise of up to this much on the features in training, so that the head tolerates its own errors."""
    steps: Annotated[int, Range(1), Role.TRAINING] = 1
    """Unrolled drafting steps in training; HASS: 3."""
    step_decay: Annotated[float, Range(0), Role.TRAINING] = 1.0
    """The weight of step s's loss is step_decay^s."""
    detach_steps: Annotated[bool, Role.TRAINING] = False
    """Stop the gradient of a step at the step before it, as HASS's code does."""


class Eagle(UnrolledHead):
    """Fusion and decoder layer(s) between the target's own embedding and output layer."""

    kind = "eagle"
    title = "EAGLE"
    Config = EagleConfig
    taps: Sequence[int] = ()

    def __init__(self, config: EagleConfig, target: Target) -> None:
        _resolve(config, target)
        super().__init__(config, target)
        self.depths = config.steps
        self.n_layers = config.n_layers
        self.tree = Dynamic(nodes=60, depth=6, topk=10)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        bias = bool(config.attention_bias)
        self.layers = nn.ModuleList(
            config.decoder_layer(target, first_norm=i > 0, bias=bias) for i in range(self.n_layers)
        )

    @torch.no_grad()
    def init_from_target(self) -> None:
        """Scale the fusion so that embedding and feature contribute equally; in many targets one is far smaller.

        The target's last layer is not copied: it reads normed states and adds to unnormed ones, the head does neither.
        On SmolLM2 a copy began at forty times the loss of random weights and had not caught up after 160 steps.
        """
        target, size = self.target, self.config.hidden_size
        ids = torch.arange(min(target.vocab_size, _SAMPLED_EMBEDDINGS), device=target.device)
        norm = target.norm_weight(target.final_norm)
        feature = 1.0 if norm is None else _rms(norm)
        self.fc.weight[:, :size] *= feature / max(_rms(target.embed(ids)), 1e-6)

    def start(self, out: TargetOutput) -> Tensor:
        return out.hidden.to(self.dtype)

    def advance(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        embeddings = self.target.embed(tokens).to(hidden.dtype)  # [B, T, H]
        hidden = self.fc(torch.cat([embeddings, hidden], -1))
        for layer, attend in zip(self.layers, attends, strict=True):
            hidden = layer(hidden, positions, attend)
        return hidden

    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """At step s row t predicts feature t+1+s and so token t+2+s, from its own feature of the previous step.

        Features are learned at all supervised rows, distributions at those whose token is in the draft vocabulary.
        """
        c = self.config
        draft_loss = DraftLoss(self, batch, out, Loss(self._distillation))
        predicts = ahead(batch, 1)[1]  # [B, T]
        features = TeacherRows(predicts, out.hidden[predicts].detach())  # of [n, H]
        loss = out.hidden.new_zeros((), dtype=torch.float32)
        unrolled = self.unroll(batch, self._noisy(self.start(out), batch), self.scored_depth, c.detach_steps)
        for step, hidden in enumerate(unrolled):  # [B, T, H]
            distilled = draft_loss.loss(step, hidden[draft_loss.rows[step]], self.target_logits)
            if step >= c.steps:  # counted in the hits, not in the loss
                continue
            supervised = ahead(batch, 2 + step)[1]  # [B, T]
            regression = feature_regression(hidden[supervised], features.ahead(supervised, 1 + step))
            loss = loss + c.step_decay**step * (c.feature_weight * regression + distilled)
        return StepLoss(loss, draft_loss.hits)

    def _distillation(self, logits: Tensor, _: Tensor, teacher: Tensor) -> Tensor:
        """The loss of a step's logits [n, D] against the target's, `teacher` [n, D]."""
        c = self.config
        loss = c.logit_weight * soft_cross_entropy(logits, teacher)
        return loss + c.topk_weight * topk_distillation(logits, teacher, c.topk) if c.topk_weight else loss

    def _noisy(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Features with uniform noise in training. It depends on the number of processes and on the micro batches."""
        noise = self.config.noise
        if not self.training or not noise:
            return hidden
        generator = noise_generator(batch, hidden.device)
        shift = torch.rand(hidden.shape, generator=generator, device=hidden.device)  # [B, T, H]
        return hidden + ((2 * shift - 1) * noise).to(hidden.dtype)

    def _log_probabilities(self, hidden: Tensor) -> Tensor:  # [n, H] -> [n, D]
        return self.target_logits(hidden).log_softmax(-1)


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def _resolve(c: EagleConfig, target: Target) -> None:
    """Fill in the values that the target decides. Raises UserError for a head that cannot be trained or built."""
    if not (c.feature_weight or c.logit_weight or c.topk_weight):
        raise UserError(
            "option head.options.feature_weight: logit_weight and topk_weight are 0 as well; set one of them above 0"
        )
    c.fill(target)
    if c.attention_bias is None:
        names = [name for name, _ in target.last_block.named_parameters()]
        c.attention_bias = any("q_proj" in name and name.endswith("bias") for name in names)
