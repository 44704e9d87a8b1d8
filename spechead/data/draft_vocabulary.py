"""Which of the target's tokens a reduced draft vocabulary contains (FR-Spec, arXiv 2502.14856).

Legend: D draft vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spechead.data.dataset import Sample
from spechead.errors import UserError

BLOCK = 1 << 20  # tokens that are counted at once


def draft_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int, kept: Tensor | None = None) -> Tensor:
    """The token ids of a draft vocabulary of `size` D, int64 [D], ascending; those of `kept` are among them.

    They are the most frequent supervised tokens, of equally frequent ones those of smaller ids; where the samples have
    fewer than `size`, the smallest other ids follow. Raises UserError for more than the target's `vocab_size` tokens.
    """
    if not 0 < size <= vocab_size:
        raise UserError(
            f"option head.options.draft_vocab_size: must be above 0 and at most the target's {vocab_size}, got {size}"
        )
    counts = count_tokens(samples, vocab_size)
    if kept is not None:
        counts[kept] += counts.max() + 1
    order = counts.sort(descending=True, stable=True).indices  # stable: among equals ids ascend
    return order[:size].sort().values


def count_tokens(samples: Iterable[Sample], vocab_size: int) -> Tensor:
    """How often each of the target's tokens is supervised, int64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    block: list[Tensor] = []
    tokens = 0
    for sample in samples:
        block.append(sample.ids[sample.supervised])
        tokens += len(block[-1])
        if tokens >= BLOCK:  # a sample is much shorter than the vocabulary
            counts += torch.bincount(torch.cat(block), minlength=vocab_size)
            block, tokens = [], 0
    return counts + torch.bincount(torch.cat(block), minlength=vocab_size) if block else counts
