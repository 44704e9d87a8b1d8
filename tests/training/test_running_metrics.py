"""Running metrics, computed by hand."""

from __future__ import annotations

import torch

from spechead.data.dataset import Sample, collate
from spechead.heads import HEADS
from spechead.heads.base import Hits, ahead
from spechead.training.distributed import Ranks
from spechead.training.module import StepOutput
from spechead.training.running_metrics import RunningMetrics
from tests.helpers.targets import make_target

ALONE = Ranks(0, 1, torch.device("cpu"))


def test_the_share_of_tokens_outside_the_draft_vocabulary_by_hand() -> None:
    target = make_target("llama")
    head = HEADS["medusa"](HEADS["medusa"].Config(draft_vocab_size=8, n_heads=1), target)
    head.set_vocabulary(torch.arange(8))
    ids, supervised = torch.tensor([9, 5, 8, 7, 30]), torch.tensor([False, True, True, True, True])
    batch = collate([Sample(ids, supervised, 0)], 512)
    metrics = RunningMetrics(head)
    hits = Hits(torch.zeros(1, 1, 5, dtype=torch.bool), batch.supervised[None])
    metrics.add(StepOutput(torch.tensor(1.0), hits), batch)
    assert metrics.values(ALONE)["outside_vocabulary"] == 0.5  # of 5, 8, 7, 30


def test_the_accuracy_of_a_depth_is_of_the_rows_that_have_such_a_token() -> None:
    target = make_target("llama")
    head = HEADS["medusa"](HEADS["medusa"].Config(n_heads=2), target)
    supervised = torch.tensor([False, False, True, True, True, True])
    batch = collate([Sample(torch.arange(6), supervised, 0)], 512)
    first, second = (ahead(batch, n)[1] for n in (2, 3))  # four and three rows: drafts of the answer's own tokens
    metrics = RunningMetrics(head)
    hits = Hits(torch.stack([first, first & second]), torch.stack([first, second]))
    metrics.add(StepOutput(torch.tensor(1.0), hits), batch)
    values = metrics.values(ALONE)
    assert (int(first.sum()), int((first & second).sum())) == (4, 3)
    assert (values["accuracy@1"], values["accuracy@2"]) == (1.0, 1.0), "every draft that can be correct is"


def test_the_losses_of_head_and_target_by_hand() -> None:
    """They average over the tokens that both were trained on: the last two of four steps of four tokens."""
    target = make_target("llama")
    head = HEADS["medusa"](HEADS["medusa"].Config(n_heads=1), target)
    batch = collate([Sample(torch.arange(5), torch.tensor([False, True, True, True, True]), 0)], 512)
    hits, metrics = (
        Hits(torch.zeros(1, 1, 5, dtype=torch.bool), batch.supervised[None]),
        RunningMetrics(head, ("head_loss", "target_loss")),
    )
    for _ in range(2):
        metrics.add(StepOutput(torch.tensor(20.0), hits), batch)
    assert metrics.note == "loss 5.00, 1.00 tokens/pass"
    for target_loss in (4.0, 8.0):
        parts = {"head_loss": torch.tensor(16.0), "target_loss": torch.tensor(target_loss)}
        metrics.add(StepOutput(torch.tensor(10.0), hits, parts), batch)
    assert metrics.note == "loss 3.75 (head_loss 4.00, target_loss 1.50), 1.00 tokens/pass"
    values = metrics.values(ALONE)
    assert (values["loss"], values["head_loss"], values["target_loss"]) == (3.75, 4.0, 1.5)
    assert "head_loss" not in metrics.values(ALONE), "sums restart"
