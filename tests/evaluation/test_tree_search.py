"""Static trees from rank paths: values by hand, against all other trees, and by size, depth and cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spechead.decoding.tree import Static, chain
from spechead.errors import UserError
from spechead.evaluation import tree_search
from spechead.evaluation.rank_paths import OUTSIDE, Answer, RankPath
from spechead.evaluation.tree_search import (
    Costs,
    accepted,
    best_nodes,
    best_trees,
    by_counts,
    by_product,
    tokens_per_pass,
)

TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))

# Two positions in five take (0, 0), two (1, 1), one (0, 1); of the last one the text ends.
PATHS: list[RankPath] = [(0, 0), (0, 0), (1, 1), (1, 1), (0, 1), (0,)]


def test_values_by_hand() -> None:
    product, counts = by_product(PATHS), by_counts(PATHS)
    assert product((0,)) == pytest.approx(4 / 6) and counts((0,)) == pytest.approx(4 / 6)
    assert product((0, 0)) == pytest.approx(4 / 6 * 2 / 5), "two of the five positions that have a second token"
    assert product((1, 0)) == pytest.approx(2 / 6 * 2 / 5), "as if depths were independent"
    assert counts((0, 0)) == counts((1, 1)) == pytest.approx(2 / 6)
    assert counts((1, 0)) == 0, "it never was"
    assert product((7,)) == counts((7,)) == 0


def test_the_two_methods_choose_by_their_own_values() -> None:
    assert best_nodes(by_product(PATHS), 4, 2) == [(0,), (0, 1), (1,), (0, 0)]  # 0.67, 0.40, 0.33, 0.27
    assert best_nodes(by_counts(PATHS), 4, 2) == [(0,), (1,), (0, 0), (1, 1)]  # 0.67, then 0.33 each
    assert best_nodes(by_counts(PATHS), 9, 2) == [(0,), (1,), (0, 0), (1, 1), (0, 1)], "the rest is worth nothing"
    assert best_nodes(by_counts(PATHS), 9, 1) == [(0,), (1,)]
    assert best_nodes(by_counts([]), 3, 3) == []


def test_a_tree_accepts_what_it_holds_of_a_path() -> None:
    nodes = set(TREE.choices)
    assert [accepted(nodes, path) for path in [(0, 0, 0, 0), (1, 0, 0), (1, 1), (3,), (), (OUTSIDE, 0)]] == [
        *(3, 2, 1, 0, 0, 0)
    ]


def test_passes_begin_where_the_last_one_ended() -> None:
    assert tokens_per_pass([[2, 9, 9, 0, 1]]) == pytest.approx(5 / 3)  # 3 tokens, then 1, then the last one of two
    assert tokens_per_pass([[0, 0], [1, 0]]) == pytest.approx(4 / 3)
    assert tokens_per_pass([[0, 0, 0]]) == 1.0


paths = st.lists(st.lists(st.integers(-1, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


@given(paths, st.integers(1, 5), st.integers(1, 3))
def test_no_tree_of_that_size_accepts_more(found: list[tuple[int, ...]], nodes: int, depth: int) -> None:
    """By counts: among all trees of ranks 0 to 2, the mean number of accepted drafts is the greatest."""
    every = [path for d in range(1, depth + 1) for path in itertools.product(range(3), repeat=d)]
    every = [path for path in every if by_counts(found)(path) > 0]
    best = 0
    for size in range(min(nodes, len(every)) + 1):
        for tree in map(set, itertools.combinations(every, size)):
            if all(len(path) == 1 or path[:-1] in tree for path in tree):
                best = max(best, sum(accepted(tree, path) for path in found))
    chosen = best_nodes(by_counts(found), nodes, depth)
    assert sum(accepted(set(chosen), path) for path in found) == best
    assert sum(map(by_counts(found), chosen)) == pytest.approx(best / len(found)), "the value is what is accepted"


@given(paths, st.integers(1, 12), st.integers(1, 3), st.sampled_from([by_product, by_counts]))
def test_chosen_nodes_are_a_tree_and_grow(found: list[tuple[int, ...]], nodes: int, depth: int, method: Any) -> None:
    chosen = best_nodes(method(found), nodes, depth)
    values = list(map(method(found), chosen))
    assert values == sorted(values, reverse=True)
    assert all(len(path) <= depth and path[:-1] in [(), *chosen[:i]] for i, path in enumerate(chosen))
    assert best_nodes(method(found), nodes - 1, depth) == chosen[: nodes - 1]
    if chosen:
        Static(tuple(chosen))


# ------------------------------------------------------------------------------------------------ of several sizes


def test_a_tree_is_scored_on_answers_that_it_was_not_chosen_on() -> None:
    answers: list[Answer] = [[(0, 0)] * 8, [(1, 1)] * 8]
    [found] = best_trees("counts", answers, [2], 2, None)
    assert found.tokens == 1.0, "what one half teaches helps nothing in the other"
    answers *= 2
    [found] = best_trees("counts", [answers[0], answers[0], answers[1], answers[1]], [4], 2, None)
    assert found.tokens == pytest.approx(8 / 3) and found.plan.nodes == 4


def test_trees_of_several_sizes_are_those_of_each_and_cost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Answer] = [[(0, 0), (1, 1), (0, 1)], [(0, 0, 0), (1, 0)], [(0,), (2, 1)], [(1, 1), (0, 0)]]
    sizes = [1, 2, 4, 7]
    one_by_one = [best_trees("counts", answers, [size], 3, None)[0] for size in sizes]
    valued: list[Any] = []
    built: list[Any] = []

    def value(paths: Any) -> Any:
        valued.append(paths)
        return by_counts(paths)

    def build(*arguments: Any) -> Any:
        built.append(arguments[1:])
        return best_nodes(*arguments)

    monkeypatch.setitem(tree_search.METHODS, "counts", value)
    monkeypatch.setattr(tree_search, "best_nodes", build)
    assert best_trees("counts", answers, sizes, 3, None) == one_by_one
    assert len(valued) == 3 and built == [(7, depth) for depth in (1, 2, 3) for _ in range(3)]


def test_costs_decide_the_depth() -> None:
    answers: list[Answer] = [[(0, 0)] * 9, [(0, 0)] * 9]
    cheap, dear = (Costs({1: 1.0, 4: 1.3}, 0.9, step, 0.1) for step in (0.0, 2.0))
    assert best_trees("counts", answers, [3], 2, cheap)[0].plan == chain(2)
    assert best_trees("counts", answers, [3], 2, dear)[0].plan == chain(1)
    assert cheap.speedup(3.0, chain(2)) == pytest.approx(3 / (0.9 * 1.2 + 0.1)), "v of 3 tokens lies on the line"
    assert dear.speedup(3.0, chain(2)) == pytest.approx(3 / (0.9 * 1.2 + 2 * 2.0 + 0.1))


def test_a_head_that_is_never_right_gets_no_tree() -> None:
    with pytest.raises(UserError, match="drafts no token of these texts right"):
        best_trees("product", [[(-1,), (-1,)], [(-1,)]], [3], 2, None)
