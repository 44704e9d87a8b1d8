"""Drafters for tests, scripted and random, and constants of the drafters' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead.decoding.tree import Plan, Static, Tree, chain
from spechead.target.model import TargetOutput
from tests.helpers.targets import VOCAB


class Scripted:
    """A drafter that knows the plain text: right for the first `right` depths of each branch, wrong after them."""

    taps: Sequence[int] = ()
    branches = True

    def __init__(self, text: Sequence[int], right: int, tree: Plan | None = None) -> None:
        self.text, self.right = list(text), right
        self.tree = tree or chain(4)

    def new_state(self, prompt: Tensor) -> dict[str, int]:
        return {"seen": 0}

    def propose(self, state: dict[str, int], fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Any = None) -> Tree:
        state["seen"] = state["seen"] + len(fresh) if state["seen"] else 1
        following = self.text[state["seen"] :] + [0] * 64
        assert isinstance(plan, Static)
        tokens, parents = [int(fresh[-1])], [-1]
        node: dict[tuple[int, ...], int] = {(): 0}
        for path in plan.choices:
            depth = len(path)
            right = path[-1] == 0 and depth <= self.right
            token = following[depth - 1]
            tokens.append(token if right else (token + 1 + path[-1]) % VOCAB)
            parents.append(node[path[:-1]])
            node[path] = len(node)
        return Tree(torch.tensor(tokens), torch.tensor(parents))


class RandomDrafter:
    """Trees of random tokens and random shape."""

    taps: Sequence[int] = ()
    branches = True
    tree: Plan = chain(11)  # no tree is deeper

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def new_state(self, prompt: Tensor) -> None:
        return None

    def propose(self, state: None, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Any = None) -> Tree:
        size = int(torch.randint(1, 12, (1,), generator=self.generator))
        tokens = torch.randint(0, VOCAB, (size,), generator=self.generator)
        parents = torch.tensor([int(torch.randint(0, i + 1, (1,), generator=self.generator)) for i in range(size)])
        return Tree(torch.cat([fresh[-1:], tokens]), torch.cat([torch.tensor([-1]), parents]))


NOTHING = TargetOutput(torch.zeros(1, 0, 0), torch.zeros(1, 0, 0))  # training-free drafters read tokens only


TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


HALF = (0, 1, 3, 5)


def record_sizes(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """The size of the second argument of each call of that method from now on."""
    sizes: list[int] = []
    method = getattr(owner, name)

    def recorded(first: Any, second: Any, *args: Any) -> Any:
        sizes.append(len(second))
        return method(first, second, *args)

    monkeypatch.setattr(owner, name, recorded)
    return sizes


def prompt_of(length: int = 9, seed: int = 1) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
