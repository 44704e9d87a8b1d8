"""What a training log says of the steps since its last line, and a validation of its samples: losses, hits, rates.

Knows nothing of how a run trains.

Legend: B rows, T tokens, K depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spechead import metrics
from spechead.data.dataset import Batch
from spechead.heads import Head
from spechead.heads.base import Hits
from spechead.training.engine import Ranks


class Window:
    """Sums over the steps since the last log line."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._clear()

    def _clear(self) -> None:
        self._loss, self._supervised, self._tokens, self._seconds = 0.0, 0, 0, 0.0
        self._correct = torch.zeros(self._head.scored_depth, dtype=torch.long)  # [K]
        self._rows = torch.zeros_like(self._correct)  # [K]: that have a token to draft
        self._passes = self._committed = self._outside = 0
        self._parts = torch.zeros(3, dtype=torch.float64)  # where head and target are trained: their losses, and tokens

    def add(self, loss: Tensor, hits: Hits, batch: Batch, parts: Tensor | None = None) -> None:
        supervised = int(batch.supervised.sum())
        self._loss += float(loss.detach())
        self._supervised += supervised
        if parts is not None:
            self._parts += torch.tensor([*parts.tolist(), supervised])
        self._outside += int((batch.supervised & ~self._head.to_draft(batch.ids)[1]).sum())
        self._tokens += int((batch.document >= 0).sum())
        starts = hits.supervised[0]  # bool [B, T]: rows at which a pass can start
        self._correct += (hits.correct & starts).sum((1, 2)).cpu()
        self._rows += (hits.supervised & starts).sum((1, 2)).cpu()
        for correct, valid in zip(hits.correct.unbind(1), starts, strict=True):
            passes, committed = metrics.walk(correct, valid)
            self._passes += passes
            self._committed += committed

    def took(self, seconds: float) -> None:
        """Time spent training; pauses for checkpoints and validation are left out."""
        self._seconds += seconds

    @property
    def note(self) -> str:
        loss = f"loss {self._loss / max(1, self._supervised):.2f}"
        apart = ", ".join(f"{name} {value:.2f}" for name, value in _apart(*self._parts.tolist()).items())
        length = self._committed / max(1, self._passes)
        return f"{loss}{f' ({apart})' if apart else ''}, {length:.2f} tokens/pass"

    def values(self, ranks: Ranks) -> dict[str, float]:
        """Loss per supervised token, accuracy by depth, the acceptance length they imply, and the rate; then anew.

        Where head and target are trained together, the loss of each as well. Beside these the share of supervised
        tokens that are outside the draft vocabulary: no draft can be right there.
        """
        counts = [self._supervised, self._outside, self._tokens, self._passes, self._committed]
        sums = torch.tensor([self._loss, *counts, *self._correct, *self._rows], dtype=torch.float64)
        loss, supervised, outside, tokens, passes, committed, *depths = ranks.sum(sums).tolist()
        hits, rows = depths[: len(depths) // 2], depths[len(depths) // 2 :]
        found = {"loss": loss / max(1, supervised)} | _apart(*ranks.sum(self._parts).tolist())
        found["acceptance_length"] = committed / max(1, passes)
        found["outside_vocabulary"] = outside / max(1, supervised)
        found |= {f"accuracy@{k + 1}": hit / max(1, n) for k, (hit, n) in enumerate(zip(hits, rows, strict=True))}
        if self._seconds:
            found["tokens_per_s"] = tokens / self._seconds
        self._clear()
        return found


def _apart(head: float, target: float, supervised: float) -> dict[str, float]:
    """The losses of head and target per supervised token, where both were trained."""
    return {"head_loss": head / supervised, "target_loss": target / supervised} if supervised else {}
