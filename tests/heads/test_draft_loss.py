"""Losses in chunks of rows: the same loss and gradients, whatever is computed at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead.data.dataset import Batch, collate
from spechead.heads import HEADS, draft_loss, losses
from spechead.heads.eagle3 import Eagle3
from spechead.heads.losses import LOSSES
from spechead.target.model import Target
from tests.helpers.heads import kept_for_backward, make_head, sample, step
from tests.helpers.targets import make_target

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in HEADS),
    *(("eagle3", {"loss": name}) for name in LOSSES if name != "soft_ce"),
    ("eagle3", {"loss": "lk_lambda", "draft_vocab_size": 0}),
    ("hydra", {"loss": "soft_ce", "dropout": 0.2}),
    ("medusa", {"output": "shared"}),
]


@pytest.fixture(scope="module")
def batch() -> Batch:
    target = make_target()
    return collate([sample(target), sample(target, 9, seed=4)], 64)


def judged(kind: str, options: dict[str, Any], batch: Batch, target: Target) -> tuple[float, Tensor, dict[str, Tensor]]:
    head = make_head(kind, target, **options)
    torch.manual_seed(1)
    result = step(head, batch)
    result.loss.backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    return float(result.loss.detach()), result.hits.correct, gradients


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_chunks_change_nothing(
    kind: str, options: dict[str, Any], batch: Batch, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = judged(kind, options, batch, target)
    monkeypatch.setattr(draft_loss, "LOGITS_AT_ONCE", 4 * target.vocab_size)
    chunked = judged(kind, options, batch, target)
    assert chunked[0] == pytest.approx(plain[0], rel=1e-5)
    assert torch.equal(chunked[1], plain[1])
    assert chunked[2].keys() == plain[2].keys()
    for name, gradient in plain[2].items():
        assert torch.allclose(chunked[2][name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())), name


def test_logits_are_made_for_some_rows_at_a_time(batch: Batch, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk is larger than allowed, in forward and in backward, of the head and of the target."""
    head = make_head("eagle3", target, draft_vocab_size=0)
    assert isinstance(head, Eagle3)
    rows: list[int] = []
    real, teach = head._logits, target.logits

    def logits(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        return real(hidden)

    def target_logits(hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        rows.append(hidden.shape[0])
        return teach(hidden, ids)

    monkeypatch.setattr(head, "_logits", logits)
    monkeypatch.setattr(target, "logits", target_logits)
    step(head, batch).loss.backward()
    once, rows[:] = len(rows), []
    assert once == 4 + 1  # four steps, and the target's logits once for all of them
    monkeypatch.setattr(draft_loss, "LOGITS_AT_ONCE", 5 * target.vocab_size + 3)
    step(head, batch).loss.backward()
    assert max(rows) == 5 and len(rows) > 2 * 2 * 4 * 4


@pytest.mark.parametrize("kind", HEADS)
def test_no_logits_are_kept_for_backward(
    kind: str, batch: Batch, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(kind, target, draft_vocab_size=0)
    with kept_for_backward() as plain:
        step(head, batch)
    monkeypatch.setattr(draft_loss, "LOGITS_AT_ONCE", 5 * target.vocab_size)
    with kept_for_backward() as chunked:
        step(head, batch)
    assert any(shape[-1:] == (target.vocab_size,) for shape in plain)
    assert not any(shape[-1:] == (target.vocab_size,) for shape in chunked)


def test_validation_in_chunks_needs_no_gradient(batch: Batch, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("eagle3", target)
    with torch.no_grad():
        plain = float(step(head, batch).loss)
        monkeypatch.setattr(draft_loss, "LOGITS_AT_ONCE", 100)
        assert float(step(head, batch).loss) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("loss", ["tv", "lk_alpha", "lk_lambda"])
def test_a_reduced_head_learns_from_the_targets_whole_distribution(loss: str, target: Target) -> None:
    head = make_head("eagle3", target, steps=1, loss=loss)
    assert isinstance(head, Eagle3)
    batch = collate([sample(target, 12)], 64)
    out = target.forward(batch.ids, taps=head.taps)
    found = float(head.training_step(batch, out).loss.detach())
    with torch.no_grad():
        (hidden,) = head.unroll(batch, head.start(out), 1)
    p = target.logits(out.hidden[0]).softmax(-1)[:, head.draft_ids()]  # [T, D], less than 1 in all
    q = head._logits(hidden[0]).detach().softmax(-1)
    rows = [t for t in range(batch.ids.shape[1] - 2) if batch.supervised[0, t + 2] and head.t2d[batch.ids[0, t + 2]]]
    alpha = torch.stack([torch.minimum(p[t + 1], q[t]).sum() for t in rows])
    inside = torch.stack([p[t + 1] / p[t + 1].sum() for t in rows])
    divergence = float((inside * (inside.log() - torch.stack([q[t] for t in rows]).log())).sum())
    share = math.exp(-losses.LK_ETA * float(alpha.mean()))
    variation = float((1 - alpha).sum())
    expected = {
        "tv": variation,
        "lk_alpha": float(-alpha.log().sum()),
        "lk_lambda": share * divergence + (1 - share) * variation,
    }
    assert rows and found == pytest.approx(expected[loss], rel=1e-4)


def test_chunks_on_a_packed_target(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_target(pack=True)
    plain = judged("eagle", {}, batch, make_target())
    monkeypatch.setattr(draft_loss, "LOGITS_AT_ONCE", 4 * packed.vocab_size)
    torch.manual_seed(0)
    head = make_head("eagle", make_target())
    head.target = packed
    torch.manual_seed(1)
    loss = step(head, batch).loss
    assert float(loss.detach()) == pytest.approx(plain[0], rel=1e-5)
