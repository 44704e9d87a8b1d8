"""Losses between a draft distribution and the target's.

They are sums over rows, never means: the trainer divides once by the number of supervised tokens over all ranks.
Knows nothing of heads.

Legend: n rows, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ -log q(label); logits [n, D], labels int64 [n]."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Σ_rows -Σ_v p(v) log q(v), p = softmax(teacher) over the draft vocabulary; both [n, D].

    The loss of EAGLE-3 (arXiv 2503.01840).
    """
    p = teacher.float().softmax(-1)
    return -(p * logits.float().log_softmax(-1)).sum()


def topk_distillation(logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """Σ_rows -Σ_v p(v) log q(v) over the k likeliest tokens of p = softmax(teacher) alone; both [n, D].

    The ranking loss of HASS (arXiv 2408.15766): what is drafted comes from there.
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
