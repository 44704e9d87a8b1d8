"""Which of the target's tokens a reduced draft vocabulary contains (FR-Spec, arXiv 2502.14856).

Legend: D draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spechead.data.dataset import Sample
from spechead.errors import UserError


def draft_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int, kept: Tensor | None = None) -> Tensor:
    """The token ids of a draft vocabulary of `size` D, int64 [D], ascending; those of `kept` are among them.

    They are the most frequent supervised tokens, of equally frequent ones those of smaller ids; where the samples have
    fewer than `size`, the smallest other ids follow. Raises UserError for more than the target's `vocab_size` tokens.
    """
    if not 0 < size <= vocab_size:
        raise UserError(
            f"option head.options.draft_vocab_size: must be above 0 and at most the target's {vocab_size}, got {size}"
        )
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for sample in samples:
        counts += torch.bincount(sample.ids[sample.supervised], minlength=vocab_size)
    if kept is not None:
        counts[kept] += counts.max() + 1
    order = counts.sort(descending=True, stable=True).indices  # stable: among equals ids ascend
    return order[:size].sort().values
