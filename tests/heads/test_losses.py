"""Losses by hand, their laws as properties, and chunks: the same loss and gradients, whatever is made at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spechead.data.dataset import Batch, collate
from spechead.errors import UserError
from spechead.heads import HEADS, draft_loss, losses
from spechead.heads.losses import LOSSES, acceptance, lk_blend, loss_named, negative_log_acceptance, total_variation
from spechead.target.model import Target
from tests.helpers.heads import kept_for_backward, make_head, sample, step
from tests.helpers.targets import make_target

# Two rows over three tokens: overlaps 0.25 + 0.3 + 0.2 = 0.75 and 0.1 + 0.1 + 0.6 = 0.8
P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.375, 0.375], [0.2, 0.2, 0.6]], dtype=torch.float64)
LABELS = torch.tensor([1, 2])
KL = sum(p * math.log(p / q) for p, q in zip(P.flatten().tolist(), Q.flatten().tolist(), strict=True))


def taken(name: str, logits: Tensor, labels: Tensor, teacher: Tensor) -> float:
    loss = LOSSES[name]
    return float(loss.total(loss.sums(logits, labels, teacher), len(labels)))


def random_rows(seed: int, n: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(n, width, generator=generator), 3 * torch.randn(n, width, generator=generator))


# ------------------------------------------------------------------------------------------------ by hand


def test_each_loss_by_hand() -> None:
    logits, log_p = Q.log() + 3, P.log()  # a shift of logits changes nothing
    share = math.exp(-3 * (0.75 + 0.8) / 2)
    expected = {
        "hard_ce": -math.log(0.375) - math.log(0.6),
        "soft_ce": -float((P * Q.log()).sum()),
        "kl": KL,
        "tv": 0.25 + 0.2,
        "lk_alpha": -math.log(0.75) - math.log(0.8),
        "lk_lambda": share * KL + (1 - share) * (0.25 + 0.2),
    }
    assert set(expected) == set(LOSSES)
    for name, value in expected.items():
        assert taken(name, logits, LABELS, log_p) == pytest.approx(value, rel=1e-5), name


def test_what_the_draft_vocabulary_lacks_is_never_accepted() -> None:
    """The target gives 0.4 to tokens that cannot be drafted: a perfect head gets no further than 0.6."""
    log_p = torch.tensor([[0.3, 0.2, 0.1]]).log()
    q = torch.tensor([[0.5, 1 / 3, 1 / 6]]).log()
    assert float(acceptance(q, log_p)) == pytest.approx(0.6)
    assert float(total_variation(q, log_p)) == pytest.approx(0.4)
    assert float(negative_log_acceptance(q, log_p)) == pytest.approx(-math.log(0.6))
    assert taken("kl", q, LABELS[:1], log_p) == pytest.approx(0, abs=1e-6)  # over the draft vocabulary it is perfect
    share = math.exp(-3 * 0.6)
    assert taken("lk_lambda", q, LABELS[:1], log_p) == pytest.approx((1 - share) * 0.4, rel=1e-5)


def test_lambda_goes_from_kl_to_variation() -> None:
    assert float(lk_blend(torch.tensor([5.0, 2.0]), 2)) == 5.0  # nothing accepted: KL alone
    share = math.exp(-3)
    assert float(lk_blend(torch.tensor([5.0, 0.0]), 2)) == pytest.approx(5 * share)
    assert float(lk_blend(torch.tensor([0.0, 0.0]), 0)) == 0.0  # a batch without rows
    sums = torch.tensor([5.0, 1.0], requires_grad=True)
    lk_blend(sums, 2).backward()
    share = math.exp(-1.5)
    assert sums.grad is not None and sums.grad.tolist() == pytest.approx([share, 1 - share])  # none through lambda


def test_rows_whose_drafts_are_never_accepted_learn() -> None:
    """Of 1e-13 here: their gradient is as large as any other row's, since it is that of TV over α."""
    logits = torch.tensor([[30.0, 0.0]], requires_grad=True)
    loss = negative_log_acceptance(logits, torch.tensor([[-40.0, 0.0]]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(30, rel=1e-3)
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([1, -1], rel=1e-3)


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(UserError, match=r"head\.options\.loss 'mse' is not one of hard_ce, soft_ce"):
        loss_named("mse")


# ------------------------------------------------------------------------------------------------ laws


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 9))
def test_laws_of_distances(seed: int, n: int, width: int) -> None:
    logits, teacher = random_rows(seed, n, width)
    log_p, labels = teacher.log_softmax(-1), torch.zeros(n, dtype=torch.long)
    distances = {name: taken(name, logits, labels, log_p) for name in ("kl", "tv", "lk_alpha", "lk_lambda")}
    half_l1 = 0.5 * float((log_p.exp() - logits.softmax(-1)).abs().sum())
    assert distances["tv"] == pytest.approx(half_l1, abs=1e-4)
    assert distances["tv"] <= distances["lk_alpha"] + 1e-4  # 1 - a <= -log a
    assert distances["tv"] <= math.sqrt(n * distances["kl"] / 2) + 1e-4  # Pinsker
    entropy = -float((log_p.exp() * log_p).sum())
    assert taken("soft_ce", logits, labels, teacher) == pytest.approx(distances["kl"] + entropy, rel=1e-4)
    for name in distances:
        assert taken(name, log_p, labels, log_p) == pytest.approx(0, abs=1e-4)
        assert distances[name] > -1e-4


@pytest.mark.parametrize("name", LOSSES)
def test_rows_may_be_taken_apart(name: str) -> None:
    logits, teacher = random_rows(5, 7, 6)
    log_p, labels = teacher.log_softmax(-1), torch.arange(7) % 6
    loss = LOSSES[name]
    parts = zip(logits.split(3), labels.split(3), log_p.split(3), strict=True)
    sums = torch.stack([loss.sums(*part) for part in parts]).sum(0)
    assert float(loss.total(sums, 7)) == pytest.approx(taken(name, logits, labels, log_p), rel=1e-5)


def test_the_gradient_of_lk_alpha_is_that_of_variation_over_alpha() -> None:
    one, two = Q.float().log().requires_grad_(), Q.float().log().requires_grad_()
    total_variation(one, P.log()).backward()
    negative_log_acceptance(two, P.log()).backward()
    assert one.grad is not None and two.grad is not None
    assert torch.allclose(two.grad, one.grad / torch.tensor([[0.75], [0.8]]), atol=1e-6)


# ------------------------------------------------------------------------------------------------ chunks

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
    asked: list[int] = []
    real, teach = head._logits, target.logits
    monkeypatch.setattr(head, "_logits", lambda hidden: asked.append(hidden.shape[0]) or real(hidden))
    monkeypatch.setattr(target, "logits", lambda hidden, ids=None: asked.append(hidden.shape[0]) or teach(hidden, ids))
    step(head, batch).loss.backward()
    once, asked[:] = len(asked), []
    assert once == 4 + 1  # four steps, and the target's logits once for all of them
    monkeypatch.setattr(draft_loss, "LOGITS_AT_ONCE", 5 * target.vocab_size + 3)
    step(head, batch).loss.backward()
    assert max(asked) == 5 and len(asked) > 2 * 2 * 4 * 4


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
def test_a_reduced_head_is_judged_by_the_targets_whole_distribution(loss: str, target: Target) -> None:
    head = make_head("eagle3", target, steps=1, loss=loss)
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
