"""The definitions of the numbers, on cases small enough to count by hand, and the laws that join them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spechead import metrics


def flags(*rows: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


# ------------------------------------------------------------------------------------------------ acceptance


def test_acceptance_length_is_pooled_and_undefined_without_passes() -> None:
    assert metrics.acceptance_length(12, 5) == 2.4
    assert metrics.acceptance_length(0, 0) is None


def test_two_right_then_wrong_gives_three_tokens_a_pass() -> None:
    drafted, accepted = [4] * 10, [2] * 10
    assert metrics.survival(drafted, accepted) == [1, 1, 0, 0]
    assert metrics.conditional_acceptance(drafted, accepted) == [1, 1, 0, None]
    assert 1 + sum(metrics.survival(drafted, accepted)) == 3


def test_survival_and_conditional_acceptance_by_hand() -> None:
    drafted, accepted = [3, 3, 3, 3], [0, 1, 3, 1]
    assert metrics.survival(drafted, accepted) == [3 / 4, 1 / 4, 1 / 4]
    assert metrics.conditional_acceptance(drafted, accepted) == [3 / 4, 1 / 3, 1]


def test_a_pass_counts_only_at_the_depths_it_offered() -> None:
    drafted, accepted = [0, 1, 2, 2], [0, 1, 1, 2]
    assert metrics.survival(drafted, accepted) == [1, 1 / 2]
    assert metrics.conditional_acceptance(drafted, accepted) == [1, 1 / 2]
    assert metrics.survival([], []) == [] and metrics.conditional_acceptance([0], [0]) == []


@given(st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1))))
def test_acceptance_length_of_a_chain_is_one_plus_the_sum_of_survival(case: tuple[int, list[int]]) -> None:
    length, accepted = case
    drafted = [length] * len(accepted)
    tau = metrics.acceptance_length(sum(accepted) + len(accepted), len(accepted))
    assert tau == pytest.approx(1 + sum(metrics.survival(drafted, accepted)))
    rates = [rate or 0.0 for rate in metrics.conditional_acceptance(drafted, accepted)]
    assert tau == pytest.approx(1 + sum(math.prod(rates[: k + 1]) for k in range(length)))


# ------------------------------------------------------------------------------------------------ walk


def test_walk_as_drawn_in_its_docstring() -> None:
    assert metrics.walk(flags("x.xx.x", "x..x.."), torch.ones(6, dtype=torch.bool)) == (2, 6)


def test_walk_counts_a_draft_only_after_the_shallower_ones() -> None:
    assert metrics.walk(flags("....", "xxxx"), torch.ones(4, dtype=torch.bool)) == (4, 4)


def test_walk_starts_at_the_first_valid_row_and_cuts_the_last_pass() -> None:
    valid = torch.tensor([False, False, True, True, True, False])
    assert metrics.walk(flags("xxxxxx", "xxxxxx", "xxxxxx"), valid) == (1, 3)
    assert metrics.walk(flags("xxxxxx"), valid) == (2, 3)


def test_walk_does_not_jump_from_one_run_into_the_next() -> None:
    valid = torch.tensor([True, True, False, True, True])
    assert metrics.walk(flags("xxxxx", "xxxxx", "xxxxx"), valid) == (2, 4)


def test_walk_over_nothing() -> None:
    assert metrics.walk(flags("xx"), torch.zeros(2, dtype=torch.bool)) == (0, 0)
    assert metrics.walk(torch.zeros(3, 0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)) == (0, 0)


def test_walk_is_below_the_plain_mean_where_easy_runs_cluster() -> None:
    hits, valid = flags("xx..xx..xx.."), torch.ones(12, dtype=torch.bool)
    passes, tokens = metrics.walk(hits, valid)
    assert (passes, tokens) == (9, 12)
    assert tokens / passes < 1 + hits.float().mean().item()


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=30), st.randoms(use_true_random=False))
def test_walk_commits_every_valid_row_once_in_bounded_passes(depth, rows, random) -> None:  # type: ignore[no-untyped-def]
    hits = torch.tensor([[random.random() < 0.6 for _ in rows] for _ in range(depth)]).reshape(depth, len(rows))
    valid = torch.tensor(rows, dtype=torch.bool)
    passes, tokens = metrics.walk(hits, valid)
    assert tokens == sum(rows)
    assert tokens / (depth + 1) <= passes <= tokens


# ------------------------------------------------------------------------------------------------ speed


def test_speedup_is_a_ratio_of_seconds_per_token() -> None:
    assert metrics.speedup(10, 100, 5, 100) == 2
    assert metrics.speedup(10, 50, 10, 100) == 2


def test_interval_of_equal_prompts_is_the_value_itself() -> None:
    assert metrics.interval([[6, 6, 6], [2, 2, 2]], lambda t, p: t / p) == (3, 3)
    assert metrics.interval([[6], [2]], lambda t, p: t / p) == (3, 3)


def test_interval_covers_the_pooled_value_and_repeats_exactly() -> None:
    random = np.random.default_rng(3)
    tokens, passes = random.integers(80, 120, 40), np.full(40, 50)
    bounds = metrics.interval([tokens.tolist(), passes.tolist()], lambda t, p: t / p)
    assert bounds is not None and bounds == metrics.interval([tokens.tolist(), passes.tolist()], lambda t, p: t / p)
    low, high = bounds
    assert low < tokens.sum() / passes.sum() < high
    error = tokens.std() / 50 / math.sqrt(40)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_interval_leaves_out_resamples_without_a_value() -> None:
    assert metrics.interval([[4, 0], [2, 0]], lambda t, p: t / p) == (2, 2)
    assert metrics.interval([[0, 0], [0, 0]], lambda t, p: t / p) is None
    assert metrics.interval([[], []], lambda t, p: t / p) is None


# ------------------------------------------------------------------------------------------------ theory


def test_speed_model() -> None:
    assert metrics.pass_cost(1.2, 3, 0.1, 0.05) == pytest.approx(1.55)
    assert metrics.predicted_speedup(3.1, 1.2, 3, 0.1, 0.05) == pytest.approx(2.0)
    assert metrics.predicted_speedup(1, 1, 0, 0.1) == 1
