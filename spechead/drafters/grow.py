"""Grow a tree from draft distributions, level by level, as a plan says. Knows nothing of the head behind `deepen`.

Legend: D draft vocabulary, n rows expanded at a level, m rows expanded before, N nodes of the tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spechead.tree import Dynamic, Plan, Static, Tree

Deepen = Callable[[Tensor, Tensor, Tensor], Tensor]
"""deepen(tokens [n], parents [n], visible bool [n, m+n]) -> log-probabilities [n, D], or [1, D]: one for all rows.

Rows are numbered in the order in which they are expanded, over all levels: `parents` are such numbers (-1: the root),
and `visible` tells which rows, itself included, each new row may attend to.
"""


def grow(plan: Plan, root: Tensor, first: Tensor, vocabulary: Tensor | None, deepen: Deepen) -> Tree:
    """The tree behind the token `root` int64 [] whose own draft distribution is `first` [1, D] (log-probabilities).

    `vocabulary` int64 [D] maps draft ids to target ids; None where they are the same.
    """
    levels = _Levels(vocabulary, deepen)
    if isinstance(plan, Static):
        return _grow_static(plan, root, first, levels)
    return _grow_dynamic(plan, root, first, levels)


class _Levels:
    """Keeps the visibility of expanded rows while a tree grows."""

    def __init__(self, vocabulary: Tensor | None, deepen: Deepen) -> None:
        self._vocabulary, self._deepen = vocabulary, deepen
        self._visible = torch.zeros(0, 0, dtype=torch.bool)  # [m, m]

    def best(self, logp: Tensor, k: int, rows: int) -> tuple[Tensor, Tensor]:
        """The k most probable drafts of each row: target ids [rows, k] and log-probabilities [rows, k]."""
        top = logp.topk(min(k, logp.shape[-1]), -1)
        ids = top.indices if self._vocabulary is None else self._vocabulary[top.indices]
        return ids.expand(rows, -1), top.values.expand(rows, -1)

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Draft distributions [n, D] behind `tokens` [n] whose parents are the rows `parents` [n]."""
        before, new = self._visible.shape[0], tokens.shape[0]
        seen = torch.cat([self._visible, self._visible.new_zeros(1, before)])  # last row: the root's, no row
        inherited = seen[parents.cpu()]  # [n, m]; parent -1 takes the last row
        own = torch.eye(new, dtype=torch.bool)
        rows = torch.cat([inherited, own], 1)  # [n, m+n]
        above = torch.cat([self._visible, self._visible.new_zeros(before, new)], 1)
        self._visible = torch.cat([above, rows])
        return self._deepen(tokens, parents, rows.to(tokens.device))


def _grow_static(plan: Static, root: Tensor, first: Tensor, levels: _Levels) -> Tree:
    tokens, parents = [root[None]], [torch.full((1,), -1)]
    node_of: dict[tuple[int, ...], int] = {(): 0} | {path: i + 1 for i, path in enumerate(plan.choices)}
    row_of: dict[tuple[int, ...], int] = {(): -1}
    token_of: dict[tuple[int, ...], Tensor] = {}
    sources: list[tuple[int, ...]] = [()]
    logp = first  # the rows of `logp` are these nodes' distributions
    for depth in range(1, plan.depth + 1):
        level = [path for path in plan.choices if len(path) == depth]
        ids, _ = levels.best(logp, 1 + max(path[-1] for path in level), len(sources))
        at = {source: i for i, source in enumerate(sources)}
        for path in level:
            token_of[path] = ids[at[path[:-1]], min(path[-1], ids.shape[1] - 1)]
        tokens += [torch.stack([token_of[path] for path in level])]
        parents += [torch.tensor([node_of[path[:-1]] for path in level])]
        if depth == plan.depth:
            break
        inner = {path[:-1] for path in plan.choices if len(path) == depth + 1}
        sources = [path for path in level if path in inner]
        feed = torch.stack([token_of[path] for path in sources])
        logp = levels.expand(feed, torch.tensor([row_of[path[:-1]] for path in sources], device=feed.device))
        row_of |= {path: len(row_of) - 1 + i for i, path in enumerate(sources)}
    return Tree(torch.cat(tokens), torch.cat(parents).to(root.device))


def _grow_dynamic(plan: Dynamic, root: Tensor, first: Tensor, levels: _Levels) -> Tree:
    ids, scores = levels.best(first, plan.topk, 1)
    tokens, score = [ids[0]], [scores[0]]  # candidates of all levels, in order
    parent = [torch.full_like(ids[0], -1)]  # candidate number of each candidate's parent
    frontier = torch.arange(ids.shape[1], device=root.device)  # candidates expanded next
    rows, offset, base = torch.full_like(frontier, -1), ids.shape[1], 0
    for _ in range(plan.depth - 1):
        held = torch.cat(score)[frontier]  # [n]
        logp = levels.expand(torch.cat(tokens)[frontier], rows)
        ids, steps = levels.best(logp, plan.topk, frontier.shape[0])  # [n, k]
        cumulative = held[:, None] + steps  # [n, k]
        tokens.append(ids.reshape(-1))
        score.append(cumulative.reshape(-1))
        parent.append(frontier.repeat_interleave(ids.shape[1]))
        best = cumulative.reshape(-1).topk(min(plan.topk, cumulative.numel())).indices  # [n']
        rows = base + best // ids.shape[1]  # the expanded row each new frontier node hangs from
        base += frontier.shape[0]
        frontier = offset + best
        offset += ids.numel()
    return _best_nodes(plan.nodes, root, torch.cat(tokens), torch.cat(parent), torch.cat(score))


def _best_nodes(nodes: int, root: Tensor, tokens: Tensor, parent: Tensor, score: Tensor) -> Tree:
    """Keep the most probable candidates. A stable sort keeps a parent ahead of a child of equal score."""
    kept = score.sort(descending=True, stable=True).indices[:nodes].sort().values  # [N-1]
    number = torch.zeros(tokens.shape[0] + 1, dtype=torch.long, device=root.device)  # last: the root, node 0
    number[kept] = torch.arange(1, kept.shape[0] + 1, device=root.device)
    return Tree(
        torch.cat([root[None], tokens[kept]]),
        torch.cat([torch.full((1,), -1, device=root.device), number[parent[kept]]]),
    )
