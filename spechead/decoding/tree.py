"""Trees of draft tokens, and the plans that they are grown by.

Node 0 is the last committed token; every other node is a draft, whose parent comes before it. A chain is a tree.

Legend: N nodes of a tree, the root included, V target vocabulary.
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
    """Draft tokens with their parents, and the mask and depths with which the target verifies them in one pass.

    Where drafts were sampled, row i of `drawn_from` is the distribution over target ids from which the children of node
    i were drawn, one after the other in node order and without replacement; rows of leaves are zero. None: the drafts
    are the best-ranked ones, a function of the text before them.
    """

    tokens: Tensor  # int64 [N]
    parents: Tensor  # int64 [N]; -1 for the root, else smaller than the node's own index
    drawn_from: Tensor | None = None  # float [N, V], as it was sampled

    @classmethod
    def root(cls, token: Tensor) -> Tree:
        """The token int64 [1] without drafts: plain decoding."""
        tree = cls(token, torch.full_like(token, -1))
        tree.depths = torch.zeros_like(token)
        return tree

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

    @property
    def depth(self) -> int:
        """The depth of the deepest node; waits for the device where there are drafts."""
        return int(self.depths.max()) if len(self) > 1 else 0

    def pruned(self, depth: int) -> Tree:
        """The tree without nodes deeper than `depth`."""
        if len(self) <= depth + 1:  # too few nodes to be deeper
            return self
        keep = self.depths <= depth
        if bool(keep.all()):
            return self
        renumbered = keep.cumsum(0) - 1  # parents are shallower, so they are kept, too
        parents = self.parents[keep]
        tree = Tree(self.tokens[keep], torch.where(parents < 0, parents, renumbered[parents.clamp(min=0)]))
        if self.drawn_from is not None:
            leaves = self.depths[keep] == depth
            tree.drawn_from = self.drawn_from[keep].masked_fill_(leaves[:, None], 0)
        return tree


@dataclass(frozen=True)
class Static:
    """A tree of the same shape in each pass (Medusa's tree choices, arXiv 2401.10774).

    A node is the tuple of ranks that leads to it; where drafts are sampled, siblings are drawn in the order of their
    ranks. A node whose path is less probable than `floor` is not expanded. Raises UserError for choices that are no
    tree.
    """

    choices: tuple[tuple[int, ...], ...]
    floor: float = 0.0  # in [0, 1); of the product of the draft probabilities on a path

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.choices), key=lambda path: (len(path), path)))
        present = set(ordered)
        for path in ordered:
            if not path or min(path) < 0:
                raise UserError(f"option tree: node {list(path)} is not a list of ranks from 0")
            if len(path) > 1 and path[:-1] not in present:
                raise UserError(f"option tree: node {list(path)} has no parent {list(path[:-1])} in the tree")
        if not ordered:
            raise UserError("option tree: a static tree needs at least one node")
        object.__setattr__(self, "choices", ordered)
        _check_floor(self)

    @property
    def depth(self) -> int:
        return len(self.choices[-1])

    @property
    def nodes(self) -> int:
        return len(self.choices)

    def limited(self, depth: int) -> Static:
        """The plan without nodes deeper than `depth`."""
        if self.depth <= depth:
            return self
        return replace(self, choices=tuple(path for path in self.choices if len(path) <= depth))

    def __str__(self) -> str:
        if all(path == (0,) * (i + 1) for i, path in enumerate(self.choices)):
            return f"chain:{self.depth}" + _floor_text(self)
        paths = json.dumps([list(path) for path in self.choices], separators=(",", ":"))
        return f"static:{paths}" + _floor_text(self)


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree (arXiv 2406.16858): beam expansion by cumulative draft probability, then the best nodes are kept.

    Nodes whose path is less probable than `floor` are neither expanded nor kept. Raises UserError for sizes below 1.
    """

    nodes: int  # drafts kept, the root not counted
    depth: int
    topk: int  # children of a node, and nodes expanded at each level
    floor: float = 0.0  # in [0, 1); of the product of the draft probabilities on a path

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "topk"):
            if getattr(self, name) < 1:
                raise UserError(f"option tree: {name} of {self} must be at least 1")
        _check_floor(self)

    def limited(self, depth: int) -> Dynamic:
        """The plan without nodes deeper than `depth`."""
        return self if self.depth <= depth else replace(self, depth=depth)

    def __str__(self) -> str:
        return f"dynamic:nodes={self.nodes},depth={self.depth},topk={self.topk}" + _floor_text(self)


Plan = Static | Dynamic


def chain(depth: int, floor: float = 0.0) -> Static:
    """The plan of one branch of `depth` drafts."""
    return Static(tuple((0,) * (i + 1) for i in range(depth)), floor)


def parse_tree(text: str) -> Plan:
    """The plan that a text describes: `chain:3`, `static:[[0],[1],[0,0]]` or `dynamic:nodes=30,depth=5,topk=4`,
    optionally followed by `,floor=0.1`. Raises UserError for any other text."""
    kind, _, rest = text.partition(":")
    shape, floored, floor = rest.partition(",floor=")
    try:
        plan = _parse_shape(kind, shape)
        return replace(plan, floor=float(floor)) if floored else plan
    except (ValueError, TypeError):
        raise UserError(
            f"option tree: {text!r} is not a tree; use chain:3, static:[[0],[1],[0,0]] or "
            "dynamic:nodes=30,depth=5,topk=4; append ,floor=0.1 to stop at unlikely drafts"
        ) from None


def _parse_shape(kind: str, shape: str) -> Plan:
    """The plan without its floor. Raises ValueError or TypeError where the text describes none."""
    if kind == "chain" and shape.isdigit() and 0 < int(shape) <= 64:
        return chain(int(shape))
    if kind == "dynamic":
        sizes = dict(re.findall(r"(nodes|depth|topk)=(\d+)", shape))
        if set(sizes) == {"nodes", "depth", "topk"} and shape.count("=") == 3:
            return Dynamic(**{name: int(size) for name, size in sizes.items()})
    if kind == "static":
        return Static(tuple(tuple(int(rank) for rank in path) for path in json.loads(shape)))
    raise ValueError(kind)


def _check_floor(plan: Plan) -> None:
    if not 0 <= plan.floor < 1:
        raise UserError(f"option tree: the floor of {plan} must be at least 0 and below 1")


def _floor_text(plan: Plan) -> str:
    return f",floor={plan.floor}" if plan.floor else ""
