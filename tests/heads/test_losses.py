"""Losses by hand, and their laws as properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spechead.errors import UserError
from spechead.heads.losses import LOSSES, acceptance, lk_blend, loss_named, negative_log_acceptance, total_variation

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
    with pytest.raises(UserError, match=r"option head\.options\.loss: 'mse' is not one of hard_ce, soft_ce"):
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
