"""The best static trees of given sizes for a head, from the rank paths of its answers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from spechead import metrics
from spechead.decoding.tree import Plan, Static
from spechead.errors import UserError
from spechead.evaluation.rank_paths import Answer, RankPath

WIDEST = 20  # children that a node may have


@dataclass(frozen=True)
class Costs:
    """The costs of a pass on this machine, in plain passes."""

    v: dict[int, float]  # verifying so many tokens, over verifying one
    plain_verify: float  # share of a plain pass that is verifying
    step: float  # drafting one level
    rest: float

    def speedup(self, tokens: float, plan: Plan) -> float:
        """The speed-up that the speed model predicts for `tokens` per pass."""
        v = float(np.interp(plan.nodes + 1, list(self.v), list(self.v.values())))
        return metrics.predicted_speedup(tokens, v * self.plain_verify, plan.depth, self.step, self.rest)


@dataclass(frozen=True)
class Candidate:
    """A tree and its expected performance."""

    name: str  # the method that chose it, or "current"
    plan: Plan
    tokens: float  # per pass, on answers that the tree was not chosen on
    speedup: float | None  # by the speed model; None without measured costs

    @property
    def merit(self) -> float:
        """The number by which trees are compared."""
        return self.tokens if self.speedup is None else self.speedup


def candidate(name: str, plan: Plan, tokens: float, costs: Costs | None) -> Candidate:
    return Candidate(name, plan, tokens, None if costs is None else costs.speedup(tokens, plan))


# ------------------------------------------------------------------------------------------------ values of nodes


def by_product(paths: Sequence[RankPath]) -> Callable[[RankPath], float]:
    """The value of a node as the product of the accuracies of the ranks on its path, each over all positions that have
    a token at that depth (Medusa, arXiv 2401.10774, section 2.3.3): as if depths were independent."""
    hits = Counter((depth, rank) for path in paths for depth, rank in enumerate(path))
    total = Counter(depth for path in paths for depth in range(len(path)))

    def value(node: RankPath) -> float:
        return float(np.prod([hits[step] / max(1, total[step[0]]) for step in enumerate(node)]))

    return value


def by_counts(paths: Sequence[RankPath]) -> Callable[[RankPath], float]:
    """The value of a node as the share of positions where its whole path would be accepted. The sum of a tree's values
    is then the mean number of accepted drafts (Sequoia, arXiv 2402.12374, with measured paths in place of a rate for
    each rank)."""
    counts = Counter(path[:depth] for path in paths for depth in range(1, len(path) + 1))
    return lambda node: counts[node] / max(1, len(paths))


METHODS = {"product": by_product, "counts": by_counts}


# ------------------------------------------------------------------------------------------------ trees


def best_nodes(value: Callable[[RankPath], float], nodes: int, depth: int) -> list[RankPath]:
    """The nodes of the best tree, the most valuable first; nodes of value 0 are left out.

    A node has at most the value of its parent, so that each step may take the most valuable child of the nodes so far:
    the first n nodes are the best tree of n. Of equal values the shallower node comes first, then smaller ranks.
    """
    heap: list[tuple[float, int, RankPath]] = [(-value((rank,)), 1, (rank,)) for rank in range(WIDEST)]
    heapq.heapify(heap)
    chosen: list[RankPath] = []
    while heap and len(chosen) < nodes:
        negative, length, node = heapq.heappop(heap)
        if negative == 0:
            break
        chosen.append(node)
        for rank in range(WIDEST if length < depth else 0):
            child = (*node, rank)
            heapq.heappush(heap, (-value(child), length + 1, child))
    return chosen


def accepted(nodes: set[RankPath], path: RankPath) -> int:
    """How many drafts of a static tree are accepted where the text continues along `path`."""
    return sum(1 for _ in takewhile(lambda depth: path[:depth] in nodes, range(1, len(path) + 1)))


def tokens_per_pass(answers: Sequence[Sequence[int]]) -> float:
    """tau from the drafts accepted at each position of each answer: a pass begins where the last one ended."""
    tokens = begun = 0
    for answer in answers:
        depth = torch.tensor(answer)  # [T]
        hits = torch.arange(max(answer) or 1)[:, None] < depth  # [K, T]
        added = metrics.walk(hits, torch.ones_like(depth, dtype=torch.bool))
        begun, tokens = begun + added[0], tokens + added[1]
    return tokens / begun


def best_trees(
    name: str, answers: Sequence[Answer], sizes: Sequence[int], depth: int, costs: Costs | None
) -> list[Candidate]:
    """By one method, the best tree of each of `sizes` drafts over all depths: the fastest, or without costs the one
    with most tokens per pass.

    The tokens per pass are cross-validated: trees chosen on one half of the answers, scored on the other. The tree
    itself is chosen on all of them.
    """
    halves = answers[::2], answers[1::2]
    values = [METHODS[name]([path for answer in part for path in answer]) for part in (answers, *halves)]
    candidates: dict[int, list[Candidate]] = {size: [] for size in sizes}
    for deepest in range(1, min(depth, max(len(path) for answer in answers for path in answer)) + 1):
        chosen, *others = (best_nodes(value, max(sizes), deepest) for value in values)
        if not chosen:
            raise UserError("option head: it drafts no token of these texts right; train it first, or use other texts")
        for size in sizes:  # the first n nodes are the best tree of n
            trees = [set(nodes[:size]) for nodes in others]
            scored = [
                [accepted(tree, path) for path in answer]
                for tree, half in zip(trees, halves[::-1], strict=True)
                for answer in half
            ]
            candidates[size].append(candidate(name, Static(tuple(chosen[:size])), tokens_per_pass(scored), costs))
    return [max(trees, key=lambda tree: tree.merit) for trees in candidates.values()]
