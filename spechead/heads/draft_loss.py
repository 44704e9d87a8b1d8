"""Loss and hits of a training step, in memory that does not grow with rows x depths x vocabulary.

Logits of a few thousand rows, seven depths and a vocabulary of 128k would fill any memory. They are computed for a
chunk of rows at a time, turned into the loss, dropped, and recomputed in backward. If they are few, they are kept.

Legend: B batch, T rows, n selected rows, H hidden size, D draft vocabulary, V target vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spechead.data.dataset import Batch
from spechead.heads.base import Head, Hits, ahead
from spechead.heads.losses import Loss
from spechead.target.model import TargetOutput

LOGITS_AT_ONCE = 1 << 25
"""Logits in memory at once, 128 MB in float32; the loss over them needs about six times as much. The smollm2 recipes
stay below it and recompute nothing."""

R = TypeVar("R")


def in_chunks(work: Callable[..., R], width: int, *values: Tensor) -> list[R]:
    """Results of `work` on chunks of rows, each small enough that its logits [rows, width] are at most LOGITS_AT_ONCE.

    All `values` have the same rows. Backward calls `work` again, which must be deterministic.
    """
    parts = zip(*(value.split(max(1, LOGITS_AT_ONCE // width)) for value in values), strict=True)
    return [checkpoint(work, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]


class TeacherRows:
    """Values of the rows that predict a supervised token, looked up from earlier rows."""

    def __init__(self, predicts: Tensor, values: Tensor) -> None:  # bool [B, T]; [n, ...]
        self._number = predicts.flatten().cumsum(0).view_as(predicts) - 1  # [B, T]
        self._values = values

    def ahead(self, rows: Tensor, offset: int) -> Tensor:
        """The value of row t + offset for each selected row t: bool [B, T] -> [n, ...]."""
        return self._values[F.pad(self._number, (0, offset))[:, offset:][rows]]


class DraftLoss:
    """The rows that count at each depth of one training step, their loss, and which drafts would be accepted."""

    def __init__(self, head: Head, batch: Batch, out: TargetOutput, loss: Loss) -> None:
        self._head, self._loss = head, loss
        self.rows: list[Tensor] = []  # for depth k + 1, bool [B, T]: label is supervised and in the draft vocabulary
        self._labels: list[Tensor] = []  # their labels as draft ids, int64 [n]
        self._supervised: list[Tensor] = []  # bool [B, T]
        for k in range(head.scored_depth):
            ids, supervised = ahead(batch, 2 + k)
            labels, inside = head.to_draft(ids)
            self._supervised.append(supervised)
            self.rows.append(supervised & inside)
            self._labels.append(labels[self.rows[k]])
        predicts = ahead(batch, 1)[1]  # [B, T]
        states = out.hidden[predicts].detach()  # [n, H]
        self._width = head.target.vocab_size if loss.teacher == "whole" else head.draft_size
        self._kept = states.shape[0] * head.scored_depth * self._width <= LOGITS_AT_ONCE
        self._teachers = TeacherRows(predicts, self._teacher(states) if self._kept else states)
        self._correct = torch.zeros(head.scored_depth, *batch.ids.shape, dtype=torch.bool, device=batch.ids.device)

    def loss(self, k: int, states: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of the drafts of depth k + 1, summed over `rows[k]`; also records which of them are right.

        `states` [n, ...] are those of `rows[k]`; `logits_of` computes their logits [n, D] deterministically.
        """
        labels = self._labels[k]
        teachers = self._teachers.ahead(self.rows[k], 1 + k)  # [n, D] logits or [n, H] states

        def compare(states: Tensor, labels: Tensor, teachers: Tensor) -> tuple[Tensor, Tensor]:
            logits = logits_of(states)
            teacher = teachers if self._kept else self._teacher(teachers)
            return self._loss.sums(logits, labels, teacher), logits.detach().max(-1).indices == labels

        if self._kept:
            sums, correct = compare(states, labels, teachers)
        else:
            all_sums, all_correct = zip(*in_chunks(compare, self._width, states, labels, teachers), strict=True)
            sums, correct = torch.stack(all_sums).sum(0), torch.cat(all_correct)
        self._correct[k][self.rows[k]] = correct
        return self._loss.total(sums, labels.shape[0])

    @property
    def hits(self) -> Hits:
        return Hits(self._correct, torch.stack(self._supervised))

    @torch.no_grad()
    def _teacher(self, states: Tensor) -> Tensor:
        """The target's distribution for its own states, as `Loss.teacher` requires: [n, H] -> [n, D], or [n, 0]."""
        target, ids = self._head.target, self._head.draft_ids()
        if self._loss.teacher == "none":
            return states[:, :0]
        if self._loss.teacher == "draft":
            return target.logits(states, ids)
        logp = target.logits(states).log_softmax(-1)  # [n, V]
        return logp if ids is None else logp[:, ids]
