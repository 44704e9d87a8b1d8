"""Outcomes follow their probabilities, and depend on the seed alone."""

from __future__ import annotations

import pytest
import torch

from spechead.decoding.random_source import SeededSource


def outcomes(seed: int) -> list[int]:
    random = SeededSource(seed)
    return [random.categorical(torch.ones(1000)) for _ in range(10)] + [random.bernoulli(0.5) for _ in range(20)]


def test_the_seed_decides() -> None:
    assert outcomes(3) == outcomes(3) != outcomes(4)


def test_certain_coins() -> None:
    random = SeededSource(0)
    assert all(random.bernoulli(1.0) and not random.bernoulli(0.0) for _ in range(1000))


def test_coins_follow_their_probability() -> None:
    random = SeededSource(0)
    heads = sum(random.bernoulli(0.3) for _ in range(10_000))
    assert abs(heads - 3000) < 4 * (10_000 * 0.3 * 0.7) ** 0.5


def test_choices_follow_their_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 5.0, 3.0, 1.0, 0.0])  # need not sum to 1
    random, draws = SeededSource(1), 10_000
    counts = torch.bincount(torch.tensor([random.categorical(weights) for _ in range(draws)]), minlength=7)
    expected = weights / weights.sum() * draws
    some = weights > 0
    assert counts[~some].sum() == 0
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < 16.3  # the 0.1 % point for 3 degrees of freedom


def test_a_small_weight_among_large_ones_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed in float32 it would span nothing."""
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.tensor([0.5 + 1e-10], dtype=torch.float64))
    assert SeededSource(0).categorical(torch.tensor([1.0, 1e-9, 1.0])) == 1


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        SeededSource(0).categorical(torch.tensor(weights))
