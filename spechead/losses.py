"""Losses between a draft distribution and the target's.

They are sums over rows, never means: the trainer divides once by the number of supervised tokens over all ranks.
Knows nothing of heads.

Legend: n rows, D draft vocabulary.
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
