"""Trees and plans by hand-made cases and as properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.decoding.tree import Dynamic, Static, Tree, chain, parse_tree
from spechead.errors import UserError


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(0, 24))
    parents = [-1] + [draw(st.integers(0, i)) for i in range(size)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=size + 1, max_size=size + 1))
    return Tree(torch.tensor(tokens), torch.tensor(parents))


def test_visible_and_depths_by_hand() -> None:
    #        0
    #      1   2
    #     3   4
    #     5
    tree = Tree(torch.arange(6), torch.tensor([-1, 0, 0, 1, 2, 3]))
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert [row.nonzero().flatten().tolist() for row in tree.visible] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 2, 4],
        [0, 1, 3, 5],
    ]


@given(trees())
@settings(deadline=None)
def test_visible_is_the_set_of_ancestors(tree: Tree) -> None:
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = int(tree.parents[at])
        assert tree.visible[node].nonzero().flatten().tolist() == sorted(path)
        assert tree.depths[node] == len(path) - 1


@given(trees(), st.integers(0, 6))
@settings(deadline=None)
def test_pruning_keeps_shape(tree: Tree, depth: int) -> None:
    pruned = tree.pruned(depth)
    keep = [i for i in range(len(tree)) if tree.depths[i] <= depth]
    assert pruned.tokens.tolist() == tree.tokens[keep].tolist()
    assert pruned.depths.tolist() == tree.depths[keep].tolist()
    assert pruned.drawn_from is None


def test_pruning_a_sampled_tree_by_hand() -> None:
    #        0
    #      1   2
    #      3   4
    #      5
    rows = torch.tensor([[0.5, 0.5, 0], [0.2, 0.3, 0.5], [0.1, 0, 0.9], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    tree = Tree(torch.arange(6), torch.tensor([-1, 0, 0, 1, 2, 3]), rows)
    assert tree.pruned(3) is tree
    shallow = tree.pruned(2)
    assert shallow.drawn_from is not None and shallow.parents.tolist() == [-1, 0, 0, 1, 2]
    assert torch.equal(shallow.drawn_from, torch.cat([rows[:3], torch.zeros(2, 3)]))  # node 3 has become a leaf
    flat = tree.pruned(1)
    assert flat.drawn_from is not None and torch.equal(flat.drawn_from, torch.cat([rows[:1], torch.zeros(2, 3)]))
    assert rows[3].tolist() == [1, 0, 0]  # the whole tree is as it was


SHAPES = ["chain:3", "dynamic:nodes=30,depth=5,topk=4", "static:[[0],[1],[0,0],[0,1]]"]


@pytest.mark.parametrize("text", SHAPES)
def test_plans_read_back(text: str) -> None:
    assert str(parse_tree(text)) == text
    assert parse_tree(text).floor == 0


@pytest.mark.parametrize("shape", SHAPES)
@given(floor=st.floats(0, 1, exclude_min=True, exclude_max=True))
@settings(deadline=None)
def test_floors_read_back(shape: str, floor: float) -> None:
    plan = parse_tree(f"{shape},floor={floor}")
    assert plan == replace(parse_tree(shape), floor=floor)
    assert str(plan) == f"{shape},floor={floor}" and parse_tree(str(plan)) == plan
    assert parse_tree(f"{shape},floor=0") == parse_tree(shape)


@pytest.mark.parametrize("floor", ["-0.1", "1", "1.5", "nan", "inf"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_floor_outside_its_range_is_named(shape: str, floor: str) -> None:
    with pytest.raises(UserError, match=f"the floor of .*floor={float(floor)} must be"):
        parse_tree(f"{shape},floor={floor}")


def test_plans_are_ordered_and_limited() -> None:
    plan = Static(((0, 0), (1,), (0,)))
    assert plan.choices == ((0,), (1,), (0, 0))
    assert plan.limited(1).choices == ((0,), (1,))
    assert chain(4).limited(2) == chain(2)
    assert chain(4, 0.5).limited(2) == chain(2, 0.5)
    assert Dynamic(30, 5, 4, 0.5).limited(2) == Dynamic(30, 2, 4, 0.5)
    for same in (chain(4), Dynamic(30, 5, 4)):
        assert same.limited(5) is same


@pytest.mark.parametrize(
    "text",
    ["", "chain", "chain:0", "chain:x", "dynamic:nodes=3", "dynamic:nodes=0,depth=1,topk=1", "static:[[0,0]]"]
    + [
        "static:",
        "static:[[]]",
        "static:[[-1]]",
        "static:[3]",
        "tree:3",
        "dynamic:nodes=3,depth=2,topk=1,x=1",
        "chain:3,floor=",
        "chain:3,floor=x",
        "chain:3,floor=0.1,floor=0.2",
        "chain:3floor=0.1",
        "dynamic:nodes=3,floor=0.1,depth=2,topk=1",
        "tree:3,floor=0.1",
    ],
)
def test_bad_plans_are_named(text: str) -> None:
    with pytest.raises(UserError):
        parse_tree(text)
