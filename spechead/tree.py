"""Trees of draft tokens, and the plans they are grown by.

Node 0 is the last committed token; every other node is a draft whose parent comes before it. A chain is a tree. Knows
nothing of models or of how the drafts were found.

Legend: N nodes of a tree, the root included.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from spechead.errors import UserError


@dataclass
class Tree:
    """Draft tokens with parents, and what the target needs to verify them in one pass."""

    tokens: Tensor  # int64 [N]
    parents: Tensor  # int64 [N]; -1 for the root, else smaller than the node's own index

    @classmethod
    def root(cls, token: Tensor) -> Tree:
        """Nothing drafted behind the token int64 [1]: plain decoding."""
        return cls(token, torch.full_like(token, -1))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def visible(self) -> Tensor:
        """bool [N, N]: node i sees node j when j is i itself or one of its ancestors."""
        nodes = torch.arange(len(self), device=self.parents.device)
        step = self.parents[:, None] == nodes  # [N, N] one step up
        reach = (step | torch.eye(len(self), dtype=torch.bool, device=step.device)).float()
        for _ in range((len(self) - 1).bit_length()):  # each product doubles the steps
            reach = (reach @ reach).clamp_(max=1)
        return reach > 0

    @cached_property
    def depths(self) -> Tensor:
        """int64 [N]: the root has depth 0."""
        return self.visible.sum(-1) - 1

    def pruned(self, depth: int) -> Tree:
        """The tree without nodes deeper than `depth`."""
        keep = self.depths <= depth
        if bool(keep.all()):
            return self
        renumbered = keep.cumsum(0) - 1  # parents are shallower, so they stay
        parents = self.parents[keep]
        return Tree(self.tokens[keep], torch.where(parents < 0, parents, renumbered[parents.clamp(min=0)]))


@dataclass(frozen=True)
class Static:
    """The same shape at each pass (Medusa's tree choices, arXiv 2401.10774).

    A node is the tuple of ranks that leads to it.
    """

    choices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.choices), key=lambda path: (len(path), path)))
        present = set(ordered)
        for path in ordered:
            if not path or min(path) < 0:
                raise UserError(f"tree node {list(path)} is not a list of ranks from 0")
            if len(path) > 1 and path[:-1] not in present:
                raise UserError(f"tree node {list(path)} has no parent {list(path[:-1])} in the tree")
        if not ordered:
            raise UserError("a static tree needs at least one node")
        object.__setattr__(self, "choices", ordered)

    @property
    def depth(self) -> int:
        return len(self.choices[-1])

    @property
    def nodes(self) -> int:
        return len(self.choices)

    def limited(self, depth: int) -> Static:
        """The plan without nodes deeper than `depth`."""
        return Static(tuple(path for path in self.choices if len(path) <= depth))

    def __str__(self) -> str:
        if all(path == (0,) * (i + 1) for i, path in enumerate(self.choices)):
            return f"chain:{self.depth}"
        return "static:" + json.dumps([list(path) for path in self.choices], separators=(",", ":"))


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree (arXiv 2406.16858): beam expansion by cumulative draft probability, then the best nodes stay."""

    nodes: int  # drafts kept, the root not counted
    depth: int
    topk: int  # children of a node, and nodes expanded at each level

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "topk"):
            if getattr(self, name) < 1:
                raise UserError(f"tree {self}: {name} must be at least 1")

    def limited(self, depth: int) -> Dynamic:
        """The plan without nodes deeper than `depth`."""
        return replace(self, depth=min(self.depth, depth))

    def __str__(self) -> str:
        return f"dynamic:nodes={self.nodes},depth={self.depth},topk={self.topk}"


Plan = Static | Dynamic


def chain(depth: int) -> Static:
    """One draft after the other."""
    return Static(tuple((0,) * (i + 1) for i in range(depth)))


def parse_plan(text: str) -> Plan:
    """`chain:3`, `static:[[0],[1],[0,0]]` or `dynamic:nodes=30,depth=5,topk=4`."""
    kind, _, rest = text.partition(":")
    if kind == "chain" and rest.isdigit() and 0 < int(rest) <= 64:
        return chain(int(rest))
    if kind == "dynamic":
        found = dict(re.findall(r"(nodes|depth|topk)=(\d+)", rest))
        if set(found) == {"nodes", "depth", "topk"} and rest.count("=") == 3:
            return Dynamic(**{name: int(value) for name, value in found.items()})
    if kind == "static":
        try:
            return Static(tuple(tuple(int(rank) for rank in path) for path in json.loads(rest)))
        except (ValueError, TypeError):
            pass
    raise UserError(
        f"tree {text!r} is not understood; use chain:3, static:[[0],[1],[0,0]] or dynamic:nodes=30,depth=5,topk=4"
    )
