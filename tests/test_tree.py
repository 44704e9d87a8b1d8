"""Trees and plans by hand-made cases and as properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spechead.errors import UserError
from spechead.tree import Dynamic, Static, Tree, chain, parse_plan
from spechead.verify import accept


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
def test_visible_is_the_set_of_ancestors(tree: Tree) -> None:
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = int(tree.parents[at])
        assert tree.visible[node].nonzero().flatten().tolist() == sorted(path)
        assert tree.depths[node] == len(path) - 1


@given(trees(), st.integers(0, 6))
def test_pruning_keeps_shape(tree: Tree, depth: int) -> None:
    pruned = tree.pruned(depth)
    keep = [i for i in range(len(tree)) if tree.depths[i] <= depth]
    assert pruned.tokens.tolist() == tree.tokens[keep].tolist()
    assert pruned.depths.tolist() == tree.depths[keep].tolist()


@given(trees(), st.data())
def test_accept_follows_the_draw(tree: Tree, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(tree), max_size=len(tree)))
    result = accept(tree, torch.tensor(drawn))
    assert result.path[0] == 0 and len(result.tokens) == len(result.path)
    for parent, node in zip(result.path, result.path[1:], strict=False):
        assert tree.parents[node] == parent and tree.tokens[node] == drawn[parent]
    assert result.tokens == [drawn[node] for node in result.path]
    last = result.path[-1]
    children = [i for i in range(len(tree)) if tree.parents[i] == last]
    assert all(tree.tokens[i] != drawn[last] for i in children)


def test_accept_by_hand() -> None:
    tree = Tree(torch.tensor([9, 5, 6, 7, 8]), torch.tensor([-1, 0, 0, 2, 3]))
    assert accept(tree, torch.tensor([6, 1, 7, 2, 3])).__dict__ == {"path": [0, 2, 3], "tokens": [6, 7, 2]}
    assert accept(tree, torch.tensor([4, 1, 7, 2, 3])).__dict__ == {"path": [0], "tokens": [4]}
    assert accept(tree, torch.tensor([6, 1, 7, 8, 3])).tokens == [6, 7, 8, 3]


@pytest.mark.parametrize("text", ["chain:3", "dynamic:nodes=30,depth=5,topk=4", "static:[[0],[1],[0,0],[0,1]]"])
def test_plans_read_back(text: str) -> None:
    assert str(parse_plan(text)) == text


def test_plans_are_ordered_and_limited() -> None:
    plan = Static(((0, 0), (1,), (0,)))
    assert plan.choices == ((0,), (1,), (0, 0))
    assert plan.limited(1).choices == ((0,), (1,))
    assert chain(4).limited(2) == chain(2)
    assert Dynamic(30, 5, 4).limited(2).depth == 2


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
    ],
)
def test_bad_plans_are_named(text: str) -> None:
    with pytest.raises(UserError):
        parse_plan(text)
