"""Loss and hits of a training step, without ever holding the logits of all rows and depths.

A row of logits is as wide as the vocabulary: a few thousand rows of 128k and seven depths would fill any memory. They
are made for some rows at a time, turned into the loss, dropped, and made once more in backward; where all of them are
few, they are kept. Knows nothing of what gives the hidden states.

Legend: B batch, T rows, n rows chosen, H hidden size, D draft vocabulary, K depths.
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
"""Logits that may be held at once, 128 MB in float32; the loss over them takes about six times as much. The smollm2
recipes keep below it, and compute nothing twice."""

Made = TypeVar("Made")


def in_chunks(work: Callable[..., Made], width: int, *values: Tensor) -> list[Made]:
    """What `work` makes of the rows, so many at a time that it holds at most LOGITS_AT_ONCE logits [rows, width].

    `values` have the same rows. Backward has `work` make the logits again, and they must be the same.
    """
    parts = zip(*(value.split(max(1, LOGITS_AT_ONCE // width)) for value in values), strict=True)
    return [checkpoint(work, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]


class TeacherRows:
    """Values of the rows that predict a supervised token, looked up from rows further back."""

    def __init__(self, predicts: Tensor, values: Tensor) -> None:  # bool [B, T]; [n, ...]
        self._number = predicts.flatten().cumsum(0).view_as(predicts) - 1  # [B, T]
        self._values = values

    def behind(self, rows: Tensor, n: int) -> Tensor:
        """[n, ...]: for each chosen row t (bool [B, T]) the value of row t + n."""
        return self._values[F.pad(self._number, (0, n))[:, n:][rows]]


class DraftLoss:
    """Of one training step: which rows count at each depth, their loss, and which drafts would have been accepted."""

    def __init__(self, head: Head, batch: Batch, out: TargetOutput, loss: Loss) -> None:
        self._head, self._loss = head, loss
        self.rows: list[Tensor] = []  # at k, bool [B, T]: rows whose draft of depth k + 1 is supervised and can be made
        self._labels: list[Tensor] = []  # at k, int64 [n]: their tokens, as draft ids
        self._supervised: list[Tensor] = []  # at k, bool [B, T]
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
        self._true = TeacherRows(predicts, self._teacher(states) if self._kept else states)
        self._correct = torch.zeros(head.scored_depth, *batch.ids.shape, dtype=torch.bool, device=batch.ids.device)

    def loss(self, k: int, states: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of the drafts of depth k + 1, summed over `rows[k]`, and notes which of them are right.

        `states` [n, ...] holds one for each of those rows; `logits_of` makes logits [n, D] of them, the same each time.
        """
        labels = self._labels[k]
        true = self._true.behind(self.rows[k], 1 + k)  # [n, D] logits or [n, H] states

        def decide(states: Tensor, labels: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
            logits = logits_of(states)
            teacher = true if self._kept else self._teacher(true)
            return self._loss.sums(logits, labels, teacher), logits.detach().max(-1).indices == labels

        if self._kept:
            sums, correct = decide(states, labels, true)
        else:
            all_sums, all_correct = zip(*in_chunks(decide, self._width, states, labels, true), strict=True)
            sums, correct = torch.stack(all_sums).sum(0), torch.cat(all_correct)
        self._correct[k][self.rows[k]] = correct
        return self._loss.total(sums, labels.shape[0])

    @property
    def hits(self) -> Hits:
        return Hits(self._correct, torch.stack(self._supervised))

    @torch.no_grad()
    def _teacher(self, states: Tensor) -> Tensor:
        """What the target says behind its own states [n, H]: [n, D], or nothing that counts where it is not asked.

        Logits over the draft vocabulary; where the loss asks for the whole one, log-probabilities, of whose mass the
        draft vocabulary holds a share.
        """
        target, ids = self._head.target, self._head.draft_ids()
        if self._loss.teacher == "none":
            return states[:, :0]
        if self._loss.teacher == "draft":
            return target.logits(states, ids)
        logp = target.logits(states).log_softmax(-1)  # [n, V]
        return logp if ids is None else logp[:, ids]
