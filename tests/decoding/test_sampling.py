"""Warpers and processors are those of transformers; draws follow what these leave, by seed and position alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing, RepetitionPenalty, Sampler, warp
from spechead.decoding.tree import Tree
from spechead.errors import UserError

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize("temperature", [1e-30, 1e-200, 1e-320])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    for logits in (LOGITS, -LOGITS, LOGITS * 1e4):
        best = int(logits.argmax())
        assert Sampler(temperature).probabilities(logits)[0, best] == 1
        assert int(Sampler(temperature).draw(logits, [0])) == best
        ids, q = Drawing(temperature, SeededSource(0)).draw(logits, 1)
        assert int(ids) == best and q.isfinite().all()


def test_drafts_are_not_drawn_from_what_is_not_finite() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="the drafter computes values that are not finite .*draft-dtype float32"):
            Drawing(1.0, SeededSource(0)).draw(torch.tensor([[0.1, bad]]), 1)


def test_warps_by_hand() -> None:
    assert torch.allclose(warp(LOGITS, 2.0, 0, 1.0), LOGITS / 2)
    kept = warp(LOGITS, 1.0, 2, 1.0)[0]
    assert kept.isfinite().tolist() == [True, True, False, False]
    shares = LOGITS[0].softmax(-1)  # 0.644, 0.237, 0.087, 0.032
    assert shares[0] < 0.7 < shares[:2].sum()
    assert warp(LOGITS, 1.0, 0, 0.7)[0].isfinite().tolist() == [True, True, False, False]
    assert warp(LOGITS, 1.0, 0, 0.6)[0].isfinite().tolist() == [True, False, False, False]
    assert warp(LOGITS, 1.0, 3, 0.95)[0].isfinite().tolist() == [True, True, True, False]
    assert shares[2] < 0.3 * shares[0] < shares[1]
    assert warp(LOGITS, 1.0, 0, 1.0, 0.3)[0].isfinite().tolist() == [True, True, False, False]
    assert warp(LOGITS, 1.0, 0, 1.0, 0.4)[0].isfinite().tolist() == [True, False, False, False]
    assert warp(LOGITS, 0.5, 0, 1.0, 0.3)[0].isfinite().tolist() == [True, False, False, False]  # after temperature


def test_top_p_is_taken_inside_the_top_k() -> None:
    """0.644 of all tokens are 0.731 of the two best: then one is enough for 0.7."""
    assert warp(LOGITS, 1.0, 2, 0.7)[0].isfinite().tolist() == [True, False, False, False]
    assert warp(LOGITS, 1.0, 4, 0.7)[0].isfinite().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 200, 1.0, 0.0),  # more than there are
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.6, 12, 0.7, 0.0),
        (0.6, 0, 0.9, 0.05),
        (1.3, 20, 0.9, 0.1),
    ],
)
def test_warpers_are_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = 2 * torch.randn(40, 97, generator=torch.Generator().manual_seed(1))
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    theirs += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    ids: Any = torch.zeros(40, 1, dtype=torch.long)
    expected = theirs(ids, logits.clone())
    found = warp(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.allclose(found.softmax(-1), expected.softmax(-1), atol=1e-6)


def test_half_precision_is_warped_in_full() -> None:
    logits = torch.randn(40, 97, generator=torch.Generator().manual_seed(1)).bfloat16()  # many are equal
    found = warp(logits, 0.7, 20, 0.9, 0.05)
    assert found.dtype == torch.float32 and torch.equal(found, warp(logits.float(), 0.7, 20, 0.9, 0.05))
    assert (found.isfinite().sum(-1) <= 20).all()


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.8])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 30, generator=generator)
    prefixes = torch.randint(0, 30, (5, 12), generator=generator)  # some tokens stand there twice
    expected = RepetitionPenaltyLogitsProcessor(penalty)(prefixes, logits.clone())
    assert torch.equal(RepetitionPenalty(penalty)(prefixes, logits), expected)


def test_processors_see_each_node_with_its_own_prefix() -> None:
    """text 8 9 | root 8, then the drafts 9 and 7 after it, and 8 after 9: no bigram may come again."""
    tree = Tree(torch.tensor([8, 9, 7, 8]), torch.tensor([-1, 0, 0, 1]))
    logits = torch.zeros(4, 10)
    sampler = Sampler(processors=[NoRepeatNGramLogitsProcessor(2)])
    found = sampler.processed(logits, tree, torch.tensor([8, 9, 8]))
    banned = [row.isinf().nonzero()[:, 0].tolist() for row in found]
    # after ..8 no 9; after ..8 9 no 8, since 9 8 is in the text; 7 is new; after ..8 9 8 no 9
    assert banned == [[9], [8], [], [9]]
    assert not logits.any()  # the target's own logits are left as they were


def test_processors_come_in_their_order_after_the_penalty() -> None:
    text = torch.tensor([1, 2])

    def double(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits * 2

    def cap(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.clamp(max=3)

    root = Tree.root(text[-1:])
    for processors, expected in (([double, cap], [3.0, 2.0, -4.0, 3.0]), ([cap, double], [6.0, 2.0, -4.0, 6.0])):
        sampler = Sampler(repetition_penalty=2.0, processors=processors)
        assert sampler.processed(torch.tensor([[5.0, 2.0, -1.0, 4.0]]), root, text)[0].tolist() == expected


def test_noise_of_places_that_are_passed_is_dropped() -> None:
    logits = torch.zeros(3, 50)
    sampler = Sampler(1.0, seed=3)
    for start in (4, 5, 7, 100):
        sampler.draw(logits, range(start, start + 3))
        assert min(sampler._noise) == start and len(sampler._noise) <= 3


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


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
    ],
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"option {next(iter(bad))}: must be"):
        Sampler(**bad)


def test_a_copy_of_a_sampler_has_the_same_processors() -> None:
    sampler = Sampler(0.5, repetition_penalty=1.2)
    assert len(replace(sampler, seed=3)._processors) == len(sampler._processors) == 1
