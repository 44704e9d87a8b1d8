"""Losses between a draft distribution and the target's.

They are sums over rows, not means: the trainer divides once by the number of supervised tokens over all ranks.

Legend: n rows, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.errors import UserError

LK_ETA = 3.0  # the best value in arXiv 2602.23881


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ -log q(label); logits [n, D], labels int64 [n]."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Σ_rows -Σ_v p(v) log q(v), p = softmax(teacher) over the draft vocabulary; both [n, D].

    The loss of EAGLE-3 (arXiv 2503.01840).
    """
    p = teacher.float().softmax(-1)
    return -(p * logits.float().log_softmax(-1)).sum()


def kl_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """Σ_rows KL(p || q) over the draft vocabulary; both [n, D]. The gradient is that of the soft cross-entropy."""
    log_p = teacher.float().log_softmax(-1)
    return F.kl_div(logits.float().log_softmax(-1), log_p, reduction="sum", log_target=True)


def acceptance(logits: Tensor, log_p: Tensor) -> Tensor:
    """α = Σ_v min(p(v), q(v)) of each row, [n]: how often a draft sampled from q = softmax(logits) is accepted.

    `log_p` [n, D]: the target's log-probabilities. In a reduced draft vocabulary p sums to less than 1, since tokens
    outside are never drafted.
    """
    return torch.minimum(log_p.float().exp(), logits.float().softmax(-1)).sum(-1)


def total_variation(logits: Tensor, log_p: Tensor) -> Tensor:
    """Σ_rows TV(p, q) = Σ_rows 1 - α; see `acceptance`."""
    return (1 - acceptance(logits, log_p)).sum()


def negative_log_acceptance(logits: Tensor, log_p: Tensor) -> Tensor:
    """Σ_rows -log α: the loss LK^α of arXiv 2602.23881; see `acceptance`. Its gradient is that of TV over α.

    Computed in log space, so that rows whose drafts are never accepted have a gradient as well.
    """
    return -torch.minimum(log_p.float(), logits.float().log_softmax(-1)).logsumexp(-1).sum()


def topk_distillation(logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """Σ_rows -Σ_v p(v) log q(v) over the k likeliest tokens of p = softmax(teacher) alone; both [n, D].

    The ranking loss of HASS (arXiv 2408.15766): drafts are taken from these tokens.
    """
    best, ids = teacher.float().topk(min(k, teacher.shape[-1]), -1)  # [n, k]
    p = (best - teacher.float().logsumexp(-1, keepdim=True)).exp()
    log_q = logits.float().gather(-1, ids) - logits.float().logsumexp(-1, keepdim=True)
    return -(p * log_q).sum()


def feature_regression(predicted: Tensor, true: Tensor) -> Tensor:
    """Σ_rows of the mean over features of smooth L1; both [n, H].

    The regression of EAGLE (arXiv 2401.15077): half the square of a difference below 1, linear above it.
    """
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none").mean(-1).sum()


# ------------------------------------------------------------------------------------------------ by name


@dataclass(frozen=True)
class Loss:
    """A loss that can be computed in chunks of rows: sums over the rows of a chunk, and the total of all sums."""

    sums: Callable[[Tensor, Tensor, Tensor], Tensor]
    """sums(logits [n, D], labels [n], teacher [n, D]) -> [] or [m], added up over chunks of rows"""
    teacher: str = "draft"
    """What `teacher` is: `draft`: the target's logits over the draft vocabulary; `whole`: its log-probabilities there,
    normalised over the whole vocabulary, whose logits are then all computed; `none`: empty."""
    total: Callable[[Tensor, int], Tensor] = lambda sums, n: sums
    """total(sums over all rows, number of rows) -> []"""


def _kl_and_variation(logits: Tensor, _: Tensor, log_p: Tensor) -> Tensor:
    return torch.stack([kl_divergence(logits, log_p), total_variation(logits, log_p)])


def lk_blend(sums: Tensor, n: int) -> Tensor:
    """Σ_rows λ KL + (1 - λ) TV: the loss LK^λ of arXiv 2602.23881, sections 4.2 and 4.4.

    λ = exp(-η α) without a gradient, α the mean over the n rows: KL while drafts are poor, TV once they are good. One λ
    for each depth and micro batch.
    """
    divergence, variation = sums
    share = torch.exp(-LK_ETA * (1 - variation.detach() / max(1, n)))
    return share * divergence + (1 - share) * variation


LOSSES: dict[str, Loss] = {
    "hard_ce": Loss(lambda logits, labels, _: hard_cross_entropy(logits, labels), "none"),
    "soft_ce": Loss(lambda logits, _, teacher: soft_cross_entropy(logits, teacher)),
    "kl": Loss(lambda logits, _, teacher: kl_divergence(logits, teacher)),
    "tv": Loss(lambda logits, _, log_p: total_variation(logits, log_p), "whole"),
    "lk_alpha": Loss(lambda logits, _, log_p: negative_log_acceptance(logits, log_p), "whole"),
    "lk_lambda": Loss(_kl_and_variation, "whole", lk_blend),
}


def loss_named(name: str) -> Loss:
    """The loss of that name. Raises UserError if there is none."""
    if name not in LOSSES:
        raise UserError(f"option head.options.loss: {name!r} is not one of {', '.join(LOSSES)}")
    return LOSSES[name]
