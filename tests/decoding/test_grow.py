"""Growing trees: against plain searches over a toy head, by hand, and over every outcome of the draws.

Legend: D draft vocabulary, n rows expanded at a level, m rows expanded before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spechead.decoding.grow import grow
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Dynamic, Plan, Static, Tree, chain, parse_tree
from spechead.errors import UserError

ROOT = 99
MAPPED = torch.tensor([3, 4, 7, 9, 12, 13, 17])  # target ids of draft ids
BUSHY = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1)))

Path = tuple[int, ...]


class Toy:
    """A head whose distribution depends on the whole path; it checks the ancestors that each row is given."""

    def __init__(self, seed: int = 0, size: int = 7, table: dict[Path, list[float]] | None = None) -> None:
        self.seed, self.size, self.table = seed, size, table
        self.vocabulary = MAPPED[:size]
        self.rows: list[Path] = []  # the paths expanded so far, in draft ids
        self.calls = 0

    def logp(self, path: Path) -> Tensor:
        """float64 [D] after a path of draft ids."""
        if self.table is not None:
            return torch.tensor(self.table[path], dtype=torch.float64).log()
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**62)
        return torch.randn(self.size, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)

    def deepen(self, tokens: Tensor, parents: Tensor, visible: Tensor) -> Tensor:
        ids = torch.searchsorted(self.vocabulary, tokens).tolist()
        self.rows += [(self.rows[p] if p >= 0 else ()) + (x,) for x, p in zip(ids, parents.tolist(), strict=True)]
        new = self.rows[len(self.rows) - len(ids) :]
        assert visible.tolist() == [[path[: len(row)] == row for row in self.rows] for path in new]
        self.calls += 1
        return torch.stack([self.logp(path) for path in new])

    def grow(self, plan: Plan, drawing: Drawing | None = None) -> Tree:
        self.rows, self.calls = [], 0
        first = self.logp(())[None]
        return grow(plan, torch.tensor(ROOT), first, self.vocabulary, self.deepen, drawing, vocab_size=20)

    def score(self, path: Path) -> float:
        """The log-probability of a path."""
        return sum(float(self.logp(path[:i])[x]) for i, x in enumerate(path))


def paths(tree: Tree) -> list[Path]:
    """The draft ids that lead to each node."""
    found: list[Path] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        found.append((*found[parent], MAPPED.tolist().index(token)))
    return found


@st.composite
def static_plans(draw: st.DrawFn) -> Static:
    nodes: set[Path] = {()}
    for _ in range(draw(st.integers(1, 14))):
        nodes.add((*draw(st.sampled_from(sorted(nodes))), draw(st.integers(0, 4))))
    return Static(tuple(nodes - {()}))


def dynamic_plans() -> st.SearchStrategy[Dynamic]:
    return st.builds(Dynamic, nodes=st.integers(1, 20), depth=st.integers(1, 4), topk=st.integers(1, 9))


seeds = st.integers(0, 10**6)
floors = st.floats(0.001, 0.9)


# ------------------------------------------------------------------------------------------------ ranked drafts


@given(seeds, static_plans() | dynamic_plans())
@settings(deadline=None)
def test_parents_come_first(seed: int, plan: Plan) -> None:
    tree = Toy(seed).grow(plan)
    assert tree.tokens[0] == ROOT and tree.parents[0] == -1 and tree.drawn_from is None
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents.tolist()[1:], 1))
    assert len(tree) <= 1 + plan.nodes and tree.depths.max() <= plan.depth
    assert len(set(paths(tree))) == len(tree)


@given(seeds, static_plans())
@settings(deadline=None)
def test_a_static_tree_follows_the_ranks(seed: int, plan: Static) -> None:
    toy = Toy(seed)
    node: dict[Path, Path] = {(): ()}  # of each tuple of ranks, the draft ids
    for ranks in plan.choices:
        before = node[ranks[:-1]]
        node[ranks] = (*before, int(toy.logp(before).argsort(descending=True)[ranks[-1]]))
    tree = toy.grow(plan)
    assert paths(tree) == list(node.values())
    again = Tree(tree.tokens, tree.parents)
    assert torch.equal(tree.visible, again.visible) and torch.equal(tree.depths, again.depths)
    assert toy.rows == [node[ranks] for ranks in plan.choices if any(longer[:-1] == ranks for longer in plan.choices)]


@given(seeds, dynamic_plans())
@settings(deadline=None)
def test_a_dynamic_tree_is_the_best_of_a_beam(seed: int, plan: Dynamic) -> None:
    toy = Toy(seed)
    frontier: list[Path] = [()]
    candidates: list[Path] = []
    for _ in range(plan.depth):
        level = [(*path, int(x)) for path in frontier for x in toy.logp(path).argsort(descending=True)[: plan.topk]]
        candidates += level
        frontier = sorted(level, key=toy.score, reverse=True)[: plan.topk]
    best = sorted(candidates, key=toy.score, reverse=True)[: plan.nodes]
    assert sorted(paths(toy.grow(plan))) == sorted([(), *best])
    assert toy.calls == plan.depth - 1


def test_a_chain_by_hand() -> None:
    table = {(): [0.1, 0.6, 0.3], (1,): [0.2, 0.2, 0.6], (1, 2): [0.7, 0.2, 0.1]}
    toy = Toy(size=3, table=table)
    tree = toy.grow(chain(3))
    assert tree.tokens.tolist() == [ROOT, 4, 7, 3] and tree.parents.tolist() == [-1, 0, 1, 2]
    assert toy.calls == 2


@pytest.mark.parametrize("plan", [BUSHY, Dynamic(12, 3, 4)])
def test_one_distribution_may_serve_a_whole_level(plan: Plan) -> None:
    levels = [Toy(seed).logp(()) for seed in range(3)]

    def run(wide: bool) -> Tree:
        coming = iter(levels[1:])

        def deepen(tokens: Tensor, parents: Tensor, visible: Tensor) -> Tensor:
            return next(coming).expand(len(tokens) if wide else 1, -1)

        return grow(plan, torch.tensor(ROOT), levels[0][None], None, deepen)

    assert run(True).tokens.tolist() == run(False).tokens.tolist()
    assert run(True).parents.tolist() == run(False).parents.tolist()


@pytest.mark.parametrize("plan", [Static(((0,), (2,), (3,), (0, 1), (0, 5), (3, 0))), Dynamic(50, 2, 8)])
def test_ranks_beyond_the_draft_vocabulary_are_left_out(plan: Plan) -> None:
    tree = Toy(size=3).grow(plan)
    assert len(set(paths(tree))) == len(tree) == (4 if isinstance(plan, Static) else 13)


def test_equals_go_to_the_first() -> None:
    toy = Toy(size=3, table={(): [0.2, 0.4, 0.4], (1,): [1 / 3] * 3})
    assert paths(toy.grow(chain(2))) == [(), (1,), (1, 0)]


# ------------------------------------------------------------------------------------------------ floor


TABLE = {(): [0.6, 0.3, 0.1], (0,): [0.5, 0.4, 0.1], (1,): [0.9, 0.06, 0.04], (0, 0): [0.8, 0.1, 0.1]}
TABLE |= {(0, 1): [1 / 3] * 3, (1, 0): [0.2, 0.7, 0.1]}


def test_a_floor_by_hand() -> None:
    toy = Toy(size=3, table=TABLE)
    assert paths(toy.grow(chain(4, floor=0.31))) == [(), (0,), (0, 0)]  # 0.6, 0.30: it is kept and not expanded
    assert toy.calls == 1
    assert paths(toy.grow(chain(4, floor=0.61))) == [(), (0,)] and toy.calls == 0
    plan = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)), 0.26)
    assert paths(toy.grow(plan)) == [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1), (1, 0, 0)]
    assert toy.rows == [(0,), (1,), (0, 0), (1, 0)]  # 0.6, 0.3, 0.30, 0.27; not 0.1 and 0.24
    plan = Static(((0,), (1,), (1, 0), (1, 0, 0)), 0.28)  # 0.6, 0.3, 0.27
    assert paths(toy.grow(plan)) == [(), (0,), (1,), (1, 0)]
    assert paths(toy.grow(Dynamic(9, 2, 2, floor=0.25))) == [(), (0,), (1,), (0, 0), (1, 0)]
    assert paths(toy.grow(Dynamic(9, 2, 2, floor=0.35))) == [(), (0,)] and toy.rows == [(0,)]
    assert paths(toy.grow(Dynamic(9, 2, 2, floor=0.7))) == [()] and toy.calls == 0


@given(seeds, static_plans(), floors)
@settings(deadline=None)
def test_a_floor_leaves_out_what_hangs_from_unlikely_nodes(seed: int, plan: Static, floor: float) -> None:
    toy = Toy(seed)
    whole = paths(toy.grow(plan))
    tree = toy.grow(replace(plan, floor=floor))
    assert paths(tree) == [path for path in whole if not path or toy.score(path[:-1]) >= math.log(floor)]
    assert all(toy.score(path) >= math.log(floor) for path in toy.rows)
    again = Tree(tree.tokens, tree.parents)
    assert torch.equal(tree.visible, again.visible) and torch.equal(tree.depths, again.depths)


@given(seeds, dynamic_plans(), floors)
@settings(deadline=None)
def test_a_floor_leaves_unlikely_nodes_out_of_a_dynamic_tree(seed: int, plan: Dynamic, floor: float) -> None:
    toy = Toy(seed)
    whole = paths(toy.grow(plan))
    tree = toy.grow(replace(plan, floor=floor))
    assert paths(tree) == [path for path in whole if toy.score(path) >= math.log(floor)]
    assert all(toy.score(path) >= math.log(floor) for path in toy.rows)
    assert toy.calls == min(plan.depth - 1, int(tree.depths.max())) or len(tree) == 1 + plan.nodes


@given(seeds, static_plans() | dynamic_plans(), floors, floors)
@settings(deadline=None)
def test_a_higher_floor_drafts_no_more(seed: int, plan: Plan, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert set(paths(Toy(seed).grow(replace(plan, floor=high)))) <= set(paths(Toy(seed).grow(replace(plan, floor=low))))


# ------------------------------------------------------------------------------------------------ sampled drafts


class Walk:
    """Takes the outcomes of `script`, then always the first possible one, and notes what else could have happened."""

    def __init__(self, script: Path) -> None:
        self.script, self.weight = script, 1.0
        self.taken: list[int] = []
        self.others: list[Path] = []

    def bernoulli(self, probability: float) -> bool:
        raise AssertionError("drafting flips no coins")

    def categorical(self, weights: Tensor) -> int:
        possible = weights.nonzero()[:, 0].tolist()
        at = len(self.taken)
        chosen = self.script[at] if at < len(self.script) else possible[0]
        if at >= len(self.script):
            self.others += [(*self.taken, x) for x in possible[1:]]
        self.taken.append(chosen)
        self.weight *= float(weights[chosen] / weights.sum())
        return chosen


def outcomes(toy: Toy, plan: Plan, temperature: float = 1.0) -> Iterator[tuple[float, Tree]]:
    """Every tree that may be drawn, with its probability."""
    scripts: list[Path] = [()]
    while scripts:
        walk = Walk(scripts.pop())
        tree = toy.grow(plan, Drawing(temperature, walk))
        scripts += walk.others
        yield walk.weight, tree


def law(toy: Toy, plan: Plan, temperature: float = 1.0) -> dict[tuple[Path, ...], float]:
    """The probability of each tree, a tree being the paths of its nodes in node order."""
    found: dict[tuple[Path, ...], float] = {}
    for weight, tree in outcomes(toy, plan, temperature):
        drafts = tuple(paths(tree)[1:])
        found[drafts] = found.get(drafts, 0.0) + weight
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found


def q(toy: Toy, path: Path, temperature: float = 1.0) -> list[float]:
    return (toy.logp(path) / temperature).softmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_a_sampled_chain_follows_q(temperature: float) -> None:
    toy = Toy(seed=1, size=3)
    found = law(toy, chain(3), temperature)
    assert len(found) == 27
    for drafts, weight in found.items():
        (a,), (_, b), (_, _, c) = drafts
        assert drafts == ((a,), (a, b), (a, b, c))
        expected = q(toy, (), temperature)[a] * q(toy, (a,), temperature)[b] * q(toy, (a, b), temperature)[c]
        assert weight == pytest.approx(expected, abs=1e-9)


def test_siblings_are_drawn_without_replacement() -> None:
    toy = Toy(seed=2, size=4)
    plan = Static(((0,), (1,), (0, 0), (1, 0), (1, 1)))
    first = q(toy, ())
    found = law(toy, plan)
    assert len(found) == 4 * 3 * 4 * 4 * 3
    for drafts, weight in found.items():
        (a,), (b,), (_, c), (_, d), (_, e) = drafts
        assert drafts == ((a,), (b,), (a, c), (b, d), (b, e)) and a != b and d != e
        other = q(toy, (b,))
        expected = first[a] * first[b] / (1 - first[a]) * q(toy, (a,))[c] * other[d] * other[e] / (1 - other[d])
        assert weight == pytest.approx(expected, abs=1e-9)


def test_the_tree_tells_what_was_drawn_from() -> None:
    toy = Toy(seed=3, size=3)
    plan = Static(((0,), (1,), (0, 0), (1, 0), (1, 0, 0)))
    for _, tree in outcomes(toy, plan, temperature=0.7):
        assert tree.drawn_from is not None and tree.drawn_from.shape == (6, 20)
        for node, path in enumerate(paths(tree)):
            row = torch.zeros(20, dtype=torch.float64)
            if node in tree.parents.tolist():
                row[toy.vocabulary] = torch.tensor(q(toy, path, 0.7), dtype=torch.float64)
            assert torch.equal(tree.drawn_from[node], row)


def test_a_whole_vocabulary_needs_no_map() -> None:
    drawing = Drawing(1.0, Walk((2, 0)))
    first = torch.tensor([[0.2, 0.3, 0.5]]).log()
    tree = grow(Static(((0,), (1,))), torch.tensor(1), first, None, lambda *_: first, drawing, vocab_size=4)
    assert tree.tokens.tolist() == [1, 2, 0] and tree.drawn_from is not None
    assert tree.drawn_from.dtype == torch.float32
    assert torch.equal(tree.drawn_from[0, :3], first[0].softmax(-1)) and not tree.drawn_from[:, 3].any()
    assert not tree.drawn_from[1:].any()


def test_one_distribution_serves_a_level_of_draws() -> None:
    first, second = torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log()
    plan = Static(((0,), (1,), (0, 0), (1, 0), (1, 1)))
    drawing = Drawing(1.0, Walk((2, 1, 0, 1, 0)))
    tree = grow(plan, torch.tensor(0), first, None, lambda *_: second, drawing, vocab_size=3)
    assert tree.tokens.tolist() == [0, 2, 1, 0, 1, 0] and tree.parents.tolist() == [-1, 0, 0, 1, 2, 2]
    assert tree.drawn_from is not None
    assert torch.equal(tree.drawn_from[:3], torch.cat([first, second, second]).softmax(-1))


def test_no_draw_is_thrown_away_where_a_plan_skips_ranks() -> None:
    toy = Toy(seed=4, size=4)
    gaps, dense = Static(((0,), (2,), (2, 1))), Static(((0,), (1,), (1, 0)))
    assert law(toy, gaps) == pytest.approx(law(toy, dense), abs=1e-12)


def test_a_peaked_distribution_still_yields_different_siblings() -> None:
    toy = Toy(size=3, table={(): [1 - 2e-12, 1e-12, 1e-12]})
    for _, tree in outcomes(toy, Static(((0,), (1,), (2,))), temperature=0.01):
        assert sorted(paths(tree)) == [(), (0,), (1,), (2,)]


def test_a_sampled_draft_is_never_dropped_for_its_own_value() -> None:
    toy = Toy(size=3, table=TABLE | {(2,): [0.1, 0.2, 0.7]})
    drafts = law(toy, chain(2, floor=0.3))
    assert drafts == pytest.approx(  # 0.6, 0.3 and 0.1: the last one is kept and not expanded
        {((a,), (a, b)): TABLE[()][a] * TABLE[a,][b] for a in (0, 1) for b in range(3)} | {((2,),): 0.1}, abs=1e-9
    )


@given(seeds, static_plans(), floors)
@settings(deadline=None)
def test_a_floor_refuses_children_by_the_path_that_was_drawn(seed: int, plan: Static, floor: float) -> None:
    toy, floored = Toy(seed), Toy(seed)
    whole = toy.grow(plan, Drawing(1.0, First()))
    tree = floored.grow(replace(plan, floor=floor), Drawing(1.0, First()))
    assert paths(tree) == [path for path in paths(whole) if not path or toy.score(path[:-1]) >= math.log(floor)]
    assert tree.drawn_from is not None and whole.drawn_from is not None
    for node, path in enumerate(paths(tree)):
        expected = whole.drawn_from[paths(whole).index(path)] if node in tree.parents.tolist() else torch.zeros(20)
        assert torch.equal(tree.drawn_from[node], expected.to(torch.float64))


class First:
    """Draws the first token that is left, whatever its weight."""

    def bernoulli(self, probability: float) -> bool:
        raise AssertionError("drafting flips no coins")

    def categorical(self, weights: Tensor) -> int:
        return int(weights.nonzero()[0, 0])


def test_a_dynamic_tree_is_not_sampled() -> None:
    plan = parse_tree("dynamic:nodes=8,depth=3,topk=4")
    with pytest.raises(UserError, match="dynamic:nodes=8,depth=3,topk=4 cannot sample its drafts"):
        Toy().grow(plan, Drawing(1.0, First()))


# ------------------------------------------------------------------------------------------------ cost


def on_device(plan: Plan, device: str) -> tuple[Tree, int]:
    """A tree of a vocabulary of 50, and the deepenings it took."""
    calls = 0
    generator = torch.Generator().manual_seed(0)

    def deepen(tokens: Tensor, parents: Tensor, visible: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.randn(len(tokens), 50, generator=generator).log_softmax(-1).to(device)

    first = torch.randn(1, 50, generator=generator).log_softmax(-1).to(device)
    tree = grow(plan, torch.tensor(ROOT, device=device), first, torch.arange(50, device=device), deepen)
    return tree, calls


@pytest.mark.parametrize("plan", [chain(4), BUSHY, Dynamic(12, 4, 3)], ids=str)
def test_growing_waits_for_no_value(plan: Plan) -> None:
    tree, calls = on_device(plan, "meta")  # tensors without values: reading one fails
    assert len(tree) == 1 + plan.nodes and calls == plan.depth - 1
    assert tree.visible.shape == (len(tree), len(tree)) and tree.depths.shape == (len(tree),)


class Counting(TorchDispatchMode):
    """Counts the operations that do some work, the head's and views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("plan", "a_level", "once"),
    [(chain(3), 5, 1), (BUSHY, 5, 1), (Dynamic(12, 3, 3), 11, 8)],
    ids=str,
)
def test_growing_takes_few_operations(plan: Plan, a_level: int, once: int) -> None:
    first = torch.randn(1, 50).log_softmax(-1)
    answers = {n: torch.randn(n, 50).log_softmax(-1) for n in range(1, 5)}

    def run() -> None:
        grow(plan, torch.tensor(ROOT), first, torch.arange(50), lambda tokens, *_: answers[len(tokens)])

    run()  # what all trees of a plan share is made once
    with Counting() as counting:
        run()
    assert len(counting.names) <= once + a_level * plan.depth + 1, counting.names
