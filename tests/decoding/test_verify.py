"""The rules by hand-made cases, with every probability that they ask for, and as properties of random trees.

That the lossless ones are so is shown in test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spechead.decoding.random_source import SeededSource
from spechead.decoding.tree import Tree
from spechead.decoding.verify import RULES, Accepted, block, exact_match, rejection, typical
from spechead.errors import UserError

V = 5


class Scripted:
    """A `RandomSource` with scripted outcomes, which records its arguments."""

    def __init__(self, coins: list[bool]) -> None:
        self.coins, self.probabilities, self.weights = coins, list[float](), list[float]()

    def bernoulli(self, probability: float) -> bool:
        self.probabilities.append(probability)
        return self.coins.pop(0)

    def categorical(self, weights: Tensor) -> int:
        self.weights = (weights / weights.sum()).tolist()
        return int(weights.argmax())


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def tree(tokens: list[int], parents: list[int], q: Tensor | None = None) -> Tree:
    return Tree(torch.tensor(tokens), torch.tensor(parents), q)


# ------------------------------------------------------------------------------------------------ exact_match


def test_exact_match_by_hand() -> None:
    drafts = tree([9, 5, 6, 7, 8], [-1, 0, 0, 2, 3])
    assert exact_match(drafts, torch.tensor([6, 1, 7, 2, 3])) == Accepted([0, 2, 3], [6, 7, 2])
    assert exact_match(drafts, torch.tensor([4, 1, 7, 2, 3])) == Accepted([0], [4])
    assert exact_match(drafts, torch.tensor([6, 1, 7, 8, 3])) == Accepted([0, 2, 3, 4], [6, 7, 8, 3])


def test_exact_match_takes_the_first_of_equal_siblings() -> None:
    assert exact_match(tree([9, 5, 5], [-1, 0, 0]), torch.tensor([5, 1, 2])) == Accepted([0, 1], [5, 1])


# ------------------------------------------------------------------------------------------------ rejection

NO_DRAW = [0.0] * 3
SIBLINGS = tree([0, 0, 1, 2], [-1, 0, 0, 0], table([0.6, 0.2, 0.2], NO_DRAW, NO_DRAW, NO_DRAW))
P = table([0.1, 0.6, 0.3], [0.2, 0.3, 0.5], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1])


def test_rejection_takes_the_first_sibling_that_passes() -> None:
    random = Scripted([True])
    assert rejection(SIBLINGS, P, random) == Accepted([0, 1], [0, 2])
    assert random.probabilities == pytest.approx([0.1 / 0.6])
    assert random.weights == pytest.approx([0.2, 0.3, 0.5])


def test_rejection_follows_the_rest_and_renormalises_siblings() -> None:
    drafts = tree([0, 0, 2, 1], [-1, 0, 0, 0], SIBLINGS.drawn_from)
    random = Scripted([False, False, True])
    assert rejection(drafts, P, random) == Accepted([0, 3], [1, 1])
    # Without 0: p - q = (-, .4, .1) makes p (0, .8, .2), and q is (0, .5, .5). Without 2: (-, .3, -), (0, 1, 0).
    assert random.probabilities == pytest.approx([0.1 / 0.6, 0.2 / 0.5, 1.0])


def test_rejection_draws_the_bonus_from_the_rest() -> None:
    drafts = tree([0, 0], [-1, 0], SIBLINGS.drawn_from[:2])  # type: ignore[index]
    random = Scripted([False])
    assert rejection(drafts, P[:2], random) == Accepted([0], [1])
    assert random.weights == pytest.approx([0.0, 0.8, 0.2])


def test_rejection_goes_down_the_accepted_branch() -> None:
    q = table([0.5, 0.5, 0.0], NO_DRAW, [0.0, 0.5, 0.5], NO_DRAW)
    drafts = tree([0, 0, 1, 2], [-1, 0, 0, 2], q)
    random = Scripted([False, True, True])
    assert rejection(drafts, P, random) == Accepted([0, 2, 3], [1, 2, 1])
    # Behind node 2, p(2) = .1 and q(2) = .5.
    assert random.probabilities == pytest.approx([0.2, 0.25, 0.2])
    assert random.weights == pytest.approx([0.1, 0.8, 0.1])


def test_a_sibling_drafted_twice_is_passed_over() -> None:
    drafts = tree([0, 0, 0, 1], [-1, 0, 0, 0], SIBLINGS.drawn_from)
    random = Scripted([False, True])
    assert rejection(drafts, P, random).path == [0, 3]
    assert random.probabilities == pytest.approx([0.1 / 0.6, 1.0])


def test_a_rejection_that_leaves_no_rest_falls_back_to_p() -> None:
    """Where p = q only rounding can reject; there is no p - q to draw from then."""
    drafts = tree([0, 0], [-1, 0], torch.stack([P[0], torch.zeros(3, dtype=P.dtype)]))
    random = Scripted([False])
    rejection(drafts, P[:2], random)
    assert random.probabilities == [1.0]
    assert random.weights == pytest.approx(P[0].tolist())


# ------------------------------------------------------------------------------------------------ block

CHAIN = tree([0, 0, 1], [-1, 0, 1], table([0.6, 0.2, 0.2], [0.5, 0.3, 0.2], NO_DRAW))


def test_block_by_hand() -> None:
    # r_1 = .1/.6 and r_1 p < q, so that s_1 = 0; r_2 = r_1 * .3/.3.
    random = Scripted([True, False, True])
    assert block(CHAIN, P[:3], random) == Accepted([0, 1, 2], [0, 1, 0])
    assert random.probabilities == pytest.approx([1.0, 0.0, 1 / 6])
    assert random.weights == pytest.approx([0.7, 0.2, 0.1])


def test_block_keeps_a_later_draft_though_an_earlier_one_failed() -> None:
    q = table([0.4, 0.3, 0.3], [0.6, 0.1, 0.3], NO_DRAW)
    p = table([0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4])
    drafts = tree([0, 0, 1], [-1, 0, 1], q)
    # r_1 = .2/.4 = .5, s_1 = .5 * .8 - .1 = .3; r_2 = min(1, .5 * .8/.1) = 1, s_2 = 1.
    random = Scripted([True, False, True])
    assert block(drafts, p, random) == Accepted([0, 1, 2], [0, 1, 2])
    assert random.probabilities == pytest.approx([1.0, 0.3 / 0.8, 1.0])
    random = Scripted([True, True, False])
    assert block(drafts, p, random) == Accepted([0, 1], [0, 1])
    assert random.weights == pytest.approx([0.0, 1.0, 0.0])
    random = Scripted([True, False, False])
    assert block(drafts, p, random) == Accepted([0], [1])
    assert random.weights == pytest.approx([0.0, 1.0, 0.0])


def test_block_of_a_draft_model_that_is_the_target() -> None:
    q = torch.cat([P[:2], torch.zeros(1, 3, dtype=P.dtype)])
    random = Scripted([True])  # only the last is asked for
    assert block(tree([0, 0, 1], [-1, 0, 1], q), P[:3], random) == Accepted([0, 1, 2], [0, 1, 0])
    assert random.probabilities == [1.0]


# ------------------------------------------------------------------------------------------------ typical


def test_typical_by_hand() -> None:
    # Uniform over four: entropy log 4, threshold min(.09, .3 / 4) = .075. Nearly certain: threshold .09.
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.92, 0.0, 0.0, 0.08], [0.905, 0.0, 0.0, 0.095], [1.0, 0, 0, 0]])
    drafts = tree([0, 1, 2, 3, 3], [-1, 0, 0, 1, 2])
    random = Scripted([])
    assert typical(drafts, p[[0, 1, 2, 3, 3]], random) == Accepted([0, 2, 4], [2, 3, 0])
    assert typical(drafts, p[[0, 1, 2, 3, 3]], random, epsilon=0.07).path == [0, 2, 4]  # as deep, and likelier
    assert typical(drafts, p[[0, 1, 2, 3, 3]], random, epsilon=0.5, delta=1.0).path == [0]  # .25 does not exceed 1/4
    assert random.weights == [0.25] * 4


def test_typical_takes_the_likeliest_of_the_deepest_paths() -> None:
    p = table([0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.1, 0.1, 0.8])
    drafts = tree([0, 0, 2, 1], [-1, 0, 0, 0])
    assert typical(drafts, p, Scripted([])) == Accepted([0, 3], [1, 2])


# ------------------------------------------------------------------------------------------------ all


@pytest.mark.parametrize("rule", [rejection, block, typical])
def test_without_drafts_the_bonus_follows_p(rule: Callable[..., Accepted]) -> None:
    random = Scripted([True])
    assert rule(Tree.root(torch.tensor([4])), P[:1], random) == Accepted([0], [1])
    assert random.weights == pytest.approx(P[0].tolist())


def test_rules_refuse_what_would_bias_them() -> None:
    chain, some = tree([0, 1], [-1, 0]), tree([0, 1, 2], [-1, 0, 1], table([0, 1, 0], NO_DRAW, NO_DRAW))
    for rule in (rejection, block):
        for ranked in (chain, some):
            with pytest.raises(UserError, match="ranked.*exact_match"):
                rule(ranked, P[: len(ranked)], SeededSource(0))
    with pytest.raises(UserError, match="block needs a chain"):
        block(SIBLINGS, P, SeededSource(0))


def test_what_rules_are_known_for() -> None:
    assert {name for name, rule in RULES.items() if rule.sampled} == {"rejection", "block"}
    assert {name for name, rule in RULES.items() if not rule.lossless} == {"typical"}
    assert all(rule.function.__name__ == name for name, rule in RULES.items())


@st.composite
def sampled_trees(draw: st.DrawFn, chains: bool = False) -> tuple[Tree, Tensor, SeededSource]:
    """A tree of tokens, some of them twice among siblings, that q holds; p with zeros; and a seed."""
    size = draw(st.integers(0, 12))
    parents = [-1] + [i if chains else draw(st.integers(0, i)) for i in range(size)]
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=size + 1, max_size=size + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    p, q = torch.rand(2, size + 1, V, generator=generator)
    p = p * (torch.rand(size + 1, V, generator=generator) > draw(st.sampled_from([0, 0.3, 0.6])))
    p = (p + (p.sum(-1, keepdim=True) == 0)) / (p + (p.sum(-1, keepdim=True) == 0)).sum(-1, keepdim=True)
    return tree(tokens, parents, q / q.sum(-1, keepdim=True)), p, SeededSource(draw(st.integers(0, 2**32)))


def check(drafts: Tree, p: Tensor, result: Accepted) -> None:
    """The path leads down from the root; its tokens are committed, and a bonus; the target might have written all."""
    assert result.path[0] == 0
    assert [int(drafts.parents[node]) for node in result.path[1:]] == result.path[:-1]
    assert [int(drafts.tokens[node]) for node in result.path[1:]] == result.tokens[:-1]
    assert all(p[node, token] > 0 for node, token in zip(result.path, result.tokens, strict=True))


@given(sampled_trees())
@settings(max_examples=200, deadline=None)
def test_results_are_paths(case: tuple[Tree, Tensor, SeededSource]) -> None:
    drafts, p, random = case
    check(drafts, p, rejection(drafts, p, random))
    check(drafts, p, typical(drafts, p, random))
    drawn = torch.tensor([random.categorical(row) for row in p])
    result = exact_match(drafts, drawn)
    check(drafts, p, result)
    assert result.tokens == drawn[result.path].tolist()
    last = drafts.tokens[drafts.parents == result.path[-1]]  # the bonus is no child's token
    assert result.tokens[-1] not in last.tolist()


@given(sampled_trees(chains=True))
@settings(max_examples=100, deadline=None)
def test_results_of_block_are_paths(case: tuple[Tree, Tensor, SeededSource]) -> None:
    drafts, p, random = case
    check(drafts, p, block(drafts, p, random))
