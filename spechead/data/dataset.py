"""Samples, packed batches of them, and the order in which training takes them.

Legend: B rows, T tokens.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A conversation, or a part of it, as the model sees it."""

    ids: Tensor  # int64 [T]
    supervised: Tensor  # bool [T]: written by the assistant
    row: int  # index of the conversation in its sources; several samples may be of one


@dataclass
class Batch:
    """Rows of one or several samples, padded on the right."""

    ids: Tensor  # int64 [B, T], pad = 0
    supervised: Tensor  # bool [B, T]
    positions: Tensor  # int64 [B, T], restart at 0 in each document
    document: Tensor  # int64 [B, T], index of the document inside the row, -1 = padding
    rows: list[int]  # Sample.row of the documents, in the order given to `collate`

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(
            self.ids.to(device),
            self.supervised.to(device),
            self.positions.to(device),
            self.document.to(device),
            self.rows,
        )


# ------------------------------------------------------------------------------------------------ samples


def answers_of_other_models(written_by: Mapping[str, int], target: str) -> str:
    """A clause that counts the conversations not marked as written by `target`; empty if there are none."""
    count = sum(written_by.values())
    others = count - written_by.get(target, 0)
    return f"{others} of {count} answers are not marked as written by {target}" if others else ""


def digest(samples: Iterable[Sample]) -> str:
    """A short hash of the samples: ids and supervision, in their order."""
    sha = hashlib.sha256()
    for sample in samples:
        sha.update(len(sample.ids).to_bytes(8))
        sha.update(sample.ids.numpy().tobytes())
        sha.update(sample.supervised.numpy().tobytes())
    return sha.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ batches


def collate(samples: Sequence[Sample], max_length: int) -> Batch:
    """Pack samples, in order, each into the first row that has room for it.

    max_length 8, samples a a a a a | b b b | c c c c:      a a a a a b b b     document 0 0 0 0 0 1 1 1
                                                            c c c c . . . .              0 0 0 0 - - - -
    """
    packed: list[list[Sample]] = []
    used: list[int] = []
    for sample in samples:
        length = len(sample.ids)
        if length > max_length:
            raise ValueError(f"sample of conversation {sample.row} has {length} tokens, more than {max_length}")
        row = next((i for i, tokens in enumerate(used) if tokens + length <= max_length), len(used))
        if row == len(used):
            packed.append([])
            used.append(0)
        packed[row].append(sample)
        used[row] += length
    shape = (len(packed), max(used, default=0))
    batch = Batch(
        ids=torch.zeros(shape, dtype=torch.long),
        supervised=torch.zeros(shape, dtype=torch.bool),
        positions=torch.zeros(shape, dtype=torch.long),
        document=torch.full(shape, -1, dtype=torch.long),
        rows=[sample.row for sample in samples],
    )
    for row, documents in enumerate(packed):
        start = 0
        for number, sample in enumerate(documents):
            span = slice(start, start + len(sample.ids))
            batch.ids[row, span] = sample.ids
            batch.supervised[row, span] = sample.supervised
            batch.positions[row, span] = torch.arange(len(sample.ids))
            batch.document[row, span] = number
            start = span.stop
    return batch


def plan_step(n_samples: int, per_step: int, seed: int, step: int) -> list[int]:
    """Sample indices of optimizer step `step` (from 0): a pure function, so that resuming needs no state.

    Epochs are seeded permutations laid end to end; a step takes the next `per_step` entries, also across the
    border of two epochs.
    """
    places = range(step * per_step, (step + 1) * per_step)
    return [permutation(n_samples, seed, place // n_samples)[place % n_samples] for place in places]


@lru_cache(maxsize=4)
def permutation(n_samples: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(n_samples).tolist()
    return order
