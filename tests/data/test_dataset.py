"""Packing, step plans, and whose answers the samples contain."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.data.dataset import Sample, answers_of_other_models, collate, plan_step


def make_sample(length: int, row: int = 0, first: int = 0) -> Sample:
    """`length` tokens from id `first` on; all but the first are supervised."""
    return Sample(torch.arange(first, first + length), torch.arange(length) > 0, row)


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def test_who_wrote_the_answers() -> None:
    assert answers_of_other_models({"x": 1, "": 2}, "x") == "2 of 3 answers are not marked as written by x"
    assert answers_of_other_models({"y": 1}, "x") == "1 of 1 answers are not marked as written by x"
    assert answers_of_other_models({"x": 4}, "x") == ""


# ------------------------------------------------------------------------------------------------ batches


def test_packing_by_hand() -> None:
    batch = collate([make_sample(5, 7, 10), make_sample(6, 8, 20), make_sample(3, 9, 30)], 8)
    assert batch.ids.tolist() == [[10, 11, 12, 13, 14, 30, 31, 32], [20, 21, 22, 23, 24, 25, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert batch.document.tolist() == [[0] * 5 + [1] * 3, [0] * 6 + [-1] * 2]
    assert batch.supervised.int().tolist() == [[0, 1, 1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0]]
    assert batch.rows == [7, 8, 9]


def test_a_batch_is_no_wider_than_its_longest_row() -> None:
    assert collate([make_sample(5)], 512).ids.shape == (1, 5)
    with pytest.raises(ValueError, match="conversation 3 has 9 tokens"):
        collate([make_sample(9, 3)], 8)


@given(lengths, st.integers(12, 24))
def test_packing_loses_and_invents_nothing(sizes: list[int], max_length: int) -> None:
    samples = [make_sample(size, row, 100 * (row + 1)) for row, size in enumerate(sizes)]
    batch = collate(samples, max_length)
    assert batch.ids.shape[1] <= max_length and batch.rows == list(range(len(sizes)))
    found = {}
    for row in range(batch.ids.shape[0]):
        number = 0
        for number in range(int(batch.document[row].max()) + 1):
            place = batch.document[row] == number
            ids = batch.ids[row][place]
            found[int(ids[0]) // 100 - 1] = ids.tolist()
            assert batch.positions[row][place].tolist() == list(range(len(ids)))
            assert batch.supervised[row][place].tolist() == [i > 0 for i in range(len(ids))]
        padding = batch.document[row] == -1
        assert not batch.supervised[row][padding].any() and not batch.ids[row][padding].any()
    assert [found[i] for i in range(len(sizes))] == [s.ids.tolist() for s in samples]


@given(lengths)
def test_packing_is_first_fit(sizes: list[int]) -> None:
    """No sample stands in a row while an earlier row had room for it when it came."""
    rows: list[int] = []
    for size in sizes:
        fitting = [i for i, used in enumerate(rows) if used + size <= 12]
        if fitting:
            rows[fitting[0]] += size
        else:
            rows.append(size)
    batch = collate([make_sample(size) for size in sizes], 12)
    assert (batch.document >= 0).sum(1).tolist() == rows


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_steps_are_epochs_laid_end_to_end(count: int, per_step: int, seed: int) -> None:
    steps = 3 * count // per_step + 1
    order = [index for step in range(steps) for index in plan_step(count, per_step, seed, step)]
    assert len(order) == steps * per_step
    for epoch in range(len(order) // count):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_plans_depend_on_seed_and_epoch() -> None:
    assert plan_step(50, 50, 0, 0) == plan_step(50, 50, 0, 0)
    assert plan_step(50, 50, 0, 0) != plan_step(50, 50, 1, 0)
    assert plan_step(50, 50, 0, 0) != plan_step(50, 50, 0, 1)
