"""Running metrics of training or of a validation: losses, draft accuracy, acceptance length and rate.

Legend: B rows, T tokens, K depths.
"""

from __future__ import annotations

import torch

from spechead import metrics
from spechead.data.dataset import Batch
from spechead.heads import Head
from spechead.training.distributed import Ranks
from spechead.training.module import StepOutput


class RunningMetrics:
    """Sums since the last line of the log. `parts`: the names of further losses, see `StepOutput.parts`."""

    def __init__(self, head: Head, parts: tuple[str, ...] = ()) -> None:
        self._head, self._names = head, parts
        self._clear()

    def _clear(self) -> None:
        self._loss, self._supervised, self._tokens, self._seconds = 0.0, 0, 0, 0.0
        self._correct = torch.zeros(self._head.scored_depth, dtype=torch.long)  # [K]
        self._supervised_at = torch.zeros_like(self._correct)  # [K]: rows with a supervised token at that depth
        self._passes = self._committed = self._outside = 0
        # each part's loss, then the supervised tokens of the batches that had parts
        self._parts = torch.zeros(len(self._names) + 1, dtype=torch.float64)

    def add(self, output: StepOutput, batch: Batch) -> None:
        supervised = int(batch.supervised.sum())
        self._loss += float(output.loss.detach())
        self._supervised += supervised
        if output.parts:
            self._parts += torch.tensor([*(float(output.parts[name]) for name in self._names), supervised])
        self._outside += int((batch.supervised & ~self._head.to_draft(batch.ids)[1]).sum())
        self._tokens += int((batch.document >= 0).sum())
        correct, supervised_at = output.hits.correct, output.hits.supervised  # bool [K, B, T]
        starts = supervised_at[0]  # bool [B, T]: rows at which a pass can start
        self._correct += (correct & starts).sum((1, 2)).cpu()
        self._supervised_at += (supervised_at & starts).sum((1, 2)).cpu()
        for row_correct, row_starts in zip(correct.unbind(1), starts, strict=True):
            passes, committed = metrics.walk(row_correct, row_starts)
            self._passes += passes
            self._committed += committed

    def add_seconds(self, seconds: float) -> None:
        """Add time spent on training steps; checkpoints and validation do not count."""
        self._seconds += seconds

    @property
    def note(self) -> str:
        """The metrics of this rank in a few words, for the progress line."""
        loss = f"loss {self._loss / max(1, self._supervised):.2f}"
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self._per_token(self._parts.tolist()).items())
        length = self._committed / max(1, self._passes)
        return f"{loss}{f' ({parts})' if parts else ''}, {length:.2f} tokens/pass"

    def values(self, ranks: Ranks) -> dict[str, float]:
        """The metrics of all ranks by their names in the log; then all sums restart at 0. Collective.

        Losses are per supervised token. `outside_vocabulary` is the share of supervised tokens outside the draft
        vocabulary, where no draft can be right.
        """
        counts = [self._supervised, self._outside, self._tokens, self._passes, self._committed]
        sums = torch.tensor([self._loss, *counts, *self._correct, *self._supervised_at], dtype=torch.float64)
        loss, supervised, outside, tokens, passes, committed, *depths = ranks.sum(sums).tolist()
        correct, rows = depths[: len(depths) // 2], depths[len(depths) // 2 :]
        values = {"loss": loss / max(1, supervised)} | self._per_token(ranks.sum(self._parts).tolist())
        values["acceptance_length"] = committed / max(1, passes)
        values["outside_vocabulary"] = outside / max(1, supervised)
        values |= {f"accuracy@{k}": hit / max(1, n) for k, (hit, n) in enumerate(zip(correct, rows, strict=True), 1)}
        if self._seconds:
            values["tokens_per_s"] = tokens / self._seconds
        self._clear()
        return values

    def _per_token(self, sums: list[float]) -> dict[str, float]:
        """The further losses per supervised token; none where no batch had them."""
        *losses, supervised = sums
        return {name: loss / supervised for name, loss in zip(self._names, losses, strict=True)} if supervised else {}
