"""Draws follow the warped distribution, and depend on seed and position alone."""

from __future__ import annotations

import pytest
import torch

from spechead.errors import UserError
from spechead.sampling import Sampler, warp

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_warps_by_hand() -> None:
    assert torch.allclose(warp(LOGITS, 2.0, 0, 1.0), LOGITS / 2)
    kept = warp(LOGITS, 1.0, 2, 1.0)[0]
    assert kept.isfinite().tolist() == [True, True, False, False]
    shares = LOGITS[0].softmax(-1)  # 0.644, 0.237, 0.087, 0.032
    assert shares[0] < 0.7 < shares[:2].sum()
    assert warp(LOGITS, 1.0, 0, 0.7)[0].isfinite().tolist() == [True, True, False, False]
    assert warp(LOGITS, 1.0, 0, 0.6)[0].isfinite().tolist() == [True, False, False, False]
    assert warp(LOGITS, 1.0, 3, 0.95)[0].isfinite().tolist() == [True, True, True, False]


@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8)])
def test_frequencies_are_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    sampler = Sampler(temperature, top_k, top_p, seed=1)
    draws = 20_000
    counts = torch.zeros(4)
    for start in range(0, draws, 2000):
        drawn = sampler.draw(LOGITS.expand(2000, -1), list(range(start, start + 2000)))
        counts += torch.bincount(drawn, minlength=4)
    expected = warp(LOGITS, temperature, top_k, top_p)[0].softmax(-1) * draws
    seen = expected > 0
    assert counts[~seen].sum() == 0
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi_square < 16.3  # the 0.1 % point for three degrees of freedom


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    together = Sampler(1.0, seed=3).draw(logits, [10, 11, 11, 12, 12, 12])
    for row, position in enumerate([10, 11, 11, 12, 12, 12]):
        assert Sampler(1.0, seed=3).draw(logits[row : row + 1], [position]) == together[row]
    same = torch.zeros(1, 50)
    places = [int(Sampler(1.0, seed=3).draw(same, [position])) for position in range(20)]
    assert len(set(places)) > 10
    assert places != [int(Sampler(1.0, seed=4).draw(same, [position])) for position in range(20)]


def test_temperature_0_is_greedy_whatever_the_seed() -> None:
    assert Sampler(0.0, seed=1).draw(LOGITS, [0]).tolist() == [0]


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_bad_settings_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad)).replace("_", "-")):
        Sampler(**bad)  # type: ignore[arg-type]
