"""Grow a tree of drafts from draft distributions, level by level, by a plan.

A plan's floor makes drafting adaptive: unlikely drafts are not expanded. Whether a node is expanded depends on the
tokens of its path alone and is decided before its children are chosen. A sampled draft is kept however unlikely it is:
to drop it because of its own value would bias the text.

Legend: D draft vocabulary, V target vocabulary, n rows expanded at a level, m rows expanded before, R rows in all with
the root's, c nodes of a level, k drafts ranked for each row, C candidates of a dynamic tree, N nodes of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Dynamic, Plan, Static, Tree
from spechead.errors import UserError

Deepen = Callable[[Tensor, Tensor, Tensor], Tensor]
"""deepen(tokens [n], parents [n], visible bool [n, m+n]) -> log-probabilities [n, D], or [1, D]: one for all rows.

Rows are numbered in the order in which they are expanded, over all levels: `parents` are such numbers (-1: the root),
and `visible` marks the rows, itself included, that each new row attends to. None of the three may be written to.
"""


def grow(
    plan: Plan,
    root: Tensor,
    first: Tensor,
    vocabulary: Tensor | None,
    deepen: Deepen,
    drawing: Drawing | None = None,
    vocab_size: int = 0,
) -> Tree:
    """The tree of drafts after the token `root` int64 [], given their distribution `first` [1, D] (log-probabilities).

    `vocabulary` int64 [D] maps draft ids to target ids; None where they are equal. Without `drawing` the best-ranked
    drafts are taken; with it they are sampled, and `drawn_from` covers `vocab_size` target ids. Ranks beyond a small
    draft vocabulary are left out.

    Raises UserError where drafts are to be sampled for a dynamic tree, which keeps drafts by their rank.
    """
    if isinstance(plan, Static):
        return _grow_static(plan, root, first, vocabulary, deepen, drawing, vocab_size)
    if drawing is not None:
        raise UserError(f"option tree: {plan} cannot sample its drafts; use a chain or a static tree")
    return _grow_dynamic(plan, root, first, vocabulary, deepen)


def _best(logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and draft ids, both [n, k], of the k likeliest drafts of each row, the best first."""
    if k == 1:
        return logp.max(-1, keepdim=True)  # the first of equals, as in the target's argmax
    return logp.topk(k, -1)


# ------------------------------------------------------------------------------------------------ static trees


@dataclass(frozen=True)
class _Level:
    """One depth of a static tree: c nodes, children of n rows, of which n' are expanded next."""

    k: int  # drafts that must be ranked for each row
    ranks: Tensor  # int64 [c]: each node's place among the k drafts of its row
    places: Tensor  # int64 [c]: the same in all rows' drafts [n, k], flattened
    sources: Tensor  # int64 [c]: each node's row, of these n
    children: Sequence[int]  # [n]: number of children of each row; siblings are adjacent
    inner: Tensor  # int64 [n']: the nodes that are expanded, of these c
    rows: Tensor  # int64 [n']: the numbers of their parents' rows
    visible: Tensor  # bool [n', m+n']


@dataclass(frozen=True)
class _Layout:
    """The tensors that all trees of a static plan share, computed once and never written to."""

    plan: Static  # without ranks beyond the draft vocabulary
    levels: Sequence[_Level]
    expanded: Tensor  # int64 [R]: the node of each row, the root first
    parents: Tensor  # int64 [N]
    visible: Tensor  # bool [N, N]
    depths: Tensor  # int64 [N]


@lru_cache(maxsize=256)
def _layout(plan: Static, size: int, device: torch.device) -> _Layout:
    """The layout of `plan` for a draft vocabulary of `size`."""
    paths = tuple(path for path in plan.choices if max(path) < size)
    plan = replace(plan, choices=paths)
    node = {path: i for i, path in enumerate([(), *paths])}
    inner = sorted({path[:-1] for path in paths}, key=node.__getitem__)  # by row, the root first
    parents = torch.tensor([-1] + [node[path[:-1]] for path in paths], device=device)
    shape = Tree(torch.zeros_like(parents), parents)
    levels = [_level(paths, inner, depth, device) for depth in range(1, plan.depth + 1)]
    expanded = torch.tensor([node[path] for path in inner], device=device)
    return _Layout(plan, levels, expanded, parents, shape.visible, shape.depths)


def _level(
    paths: Sequence[tuple[int, ...]], inner: Sequence[tuple[int, ...]], depth: int, device: torch.device
) -> _Level:
    nodes = [path for path in paths if len(path) == depth]
    sources = [path for path in inner if len(path) == depth - 1]
    following = [path for path in inner if len(path) == depth]
    known = [path for path in inner if 0 < len(path) <= depth]  # rows; the root is none
    k = 1 + max(path[-1] for path in nodes)
    number = {path: row - 1 for row, path in enumerate(inner)}
    source = [sources.index(path[:-1]) for path in nodes]

    seen = [[path[: len(row)] == row for row in known] for path in following]

    def ids(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return _Level(
        k=k,
        ranks=ids([path[-1] for path in nodes]),
        places=ids([at * k + path[-1] for at, path in zip(source, nodes, strict=True)]),
        sources=ids(source),
        children=[source.count(at) for at in range(len(sources))],
        inner=ids([nodes.index(path) for path in following]),
        rows=ids([number[path[:-1]] for path in following]),
        visible=torch.tensor(seen, dtype=torch.bool, device=device),
    )


def _grow_static(
    plan: Static,
    root: Tensor,
    first: Tensor,
    vocabulary: Tensor | None,
    deepen: Deepen,
    drawing: Drawing | None,
    vocab_size: int,
) -> Tree:
    layout = _layout(plan, first.shape[-1], root.device)
    tokens, drawn_from = [root[None]], []  # a level each
    logp, score = first, first.new_zeros(1)  # [n, D] or [1, D]; [n] the log-probability of each row's path
    depth = 0
    while depth < len(layout.levels):
        level = layout.levels[depth]
        if drawing is None:
            ids = _ranked(logp, level)  # [c] draft ids
        else:
            ids, q = _drawn(logp, level, drawing)
            drawn_from.append(q)
        tokens.append(ids if vocabulary is None else vocabulary[ids])
        depth += 1
        if plan.floor and depth < len(layout.levels):
            steps = _at(logp, level, ids) if drawing is None else _at(q, level, ids).log()
            score = score[level.sources] + steps  # [c]
            likely = (score >= math.log(plan.floor)).tolist()  # the one synchronisation of a level
            layout = _layout(_expanding(layout.plan, depth, likely), first.shape[-1], root.device)
            level = layout.levels[depth - 1]
            score = score[level.inner]
        if depth < len(layout.levels):
            logp = deepen(tokens[-1][level.inner], level.rows, level.visible)
    tree = Tree(torch.cat(tokens), layout.parents)
    tree.visible, tree.depths = layout.visible, layout.depths
    if drawing is not None:
        tree.drawn_from = _scattered(torch.cat(drawn_from), layout.expanded, len(tree), vocabulary, vocab_size)
    return tree


def _ranked(logp: Tensor, level: _Level) -> Tensor:
    """The draft ids [c] of a level's nodes, each by its rank."""
    ids = _best(logp, level.k)[1]  # [n, k], or [1, k]
    return ids.take(level.places if ids.shape[0] > 1 else level.ranks)


def _drawn(logp: Tensor, level: _Level, drawing: Drawing) -> tuple[Tensor, Tensor]:
    """The draft ids [c] of a level's nodes, as many draws as each row has children, and the rows' distributions [n, D].

    Ranks that a plan skips are not drawn and dropped: siblings must be all draws, or their distribution changes.
    """
    each = logp.expand(len(level.children), -1).split(1)  # n times [1, D]
    draws = [drawing.draw(row, count) for row, count in zip(each, level.children, strict=True)]
    return torch.cat([ids[0] for ids, _ in draws]), torch.cat([q for _, q in draws])


def _at(rows: Tensor, level: _Level, ids: Tensor) -> Tensor:
    """The values of `rows` [n, D] or [1, D] at the draft ids [c] of a level's nodes: [c]."""
    return rows[level.sources, ids] if rows.shape[0] > 1 else rows[0, ids]


def _expanding(plan: Static, depth: int, likely: Sequence[bool]) -> Static:
    """The plan without children of those nodes of `depth` that are not `likely`."""
    if all(likely):
        return plan
    level = [path for path in plan.choices if len(path) == depth]
    leaves = {path for path, expand in zip(level, likely, strict=True) if not expand}
    return replace(plan, choices=tuple(p for p in plan.choices if len(p) <= depth or p[:depth] not in leaves))


def _scattered(q: Tensor, nodes: Tensor, size: int, vocabulary: Tensor | None, vocab_size: int) -> Tensor:
    """Distributions [R, D] over draft ids as rows `nodes` [R] of a table [N, V] over target ids, zero elsewhere."""
    table = q.new_zeros(size, vocab_size)
    if vocabulary is None:
        table[nodes, : q.shape[-1]] = q
    else:
        table[nodes[:, None], vocabulary] = q
    return table


# ------------------------------------------------------------------------------------------------ dynamic trees


def _grow_dynamic(plan: Dynamic, root: Tensor, first: Tensor, vocabulary: Tensor | None, deepen: Deepen) -> Tree:
    k = min(plan.topk, first.shape[-1])
    values, ids = _best(first, k)  # [1, k]
    scores, tokens = [values[0]], [(ids if vocabulary is None else vocabulary[ids])[0]]  # candidates, a level each
    expanded = [torch.full_like(root[None], -1)]  # numbers of the candidates that are expanded, a level each
    before = 0  # candidates before the last level
    visible = torch.zeros(1, 0, dtype=torch.bool, device=root.device)  # the rows that those of the last level see
    for _ in range(plan.depth - 1):
        score, best = scores[-1].topk(min(plan.topk, len(scores[-1])))  # [n], the likeliest first
        if plan.floor:
            likely = _likely(score, plan.floor)
            if not likely:
                break
            score, best = score[:likely], best[:likely]
        expanded.append(best + before)
        before += len(scores[-1])
        parent = best // k  # [n] of the last level's rows
        rows = parent + (visible.shape[1] - visible.shape[0])  # that level's are the newest rows; the root is row -1
        visible = torch.cat([visible[parent], _eye(len(best), root.device)], 1)  # [n, m+n]
        values, ids = _best(deepen(tokens[-1][best], rows, visible), k)  # [n, k], or [1, k]
        scores.append((score[:, None] + values).flatten())  # [n * k]
        tokens.append((ids if vocabulary is None else vocabulary[ids]).expand(len(best), -1).flatten())
    parents = torch.cat(expanded).repeat_interleave(k)  # [C] candidate numbers
    return _best_nodes(plan, root, torch.cat(tokens), parents, torch.cat(scores))


def _likely(score: Tensor, floor: float) -> int:
    """How many paths are at least as probable as the floor; synchronises."""
    return int((score >= math.log(floor)).sum())


@lru_cache(maxsize=64)
def _eye(n: int, device: torch.device) -> Tensor:
    return torch.eye(n, dtype=torch.bool, device=device)


def _best_nodes(plan: Dynamic, root: Tensor, tokens: Tensor, parents: Tensor, score: Tensor) -> Tree:
    """Keep the most probable of the candidates [C]. A stable sort keeps a parent ahead of a child of equal score."""
    nodes = min(plan.nodes, _likely(score, plan.floor)) if plan.floor else plan.nodes
    kept = score.sort(descending=True, stable=True).indices[:nodes].sort().values  # [N-1] candidate numbers
    # The parent of a kept candidate is kept: its node number is 1 + the kept candidates before it; -1 becomes 0.
    above = torch.searchsorted(kept, parents[kept], right=True)
    return Tree(torch.cat([root[None], tokens[kept]]), torch.cat([torch.full_like(root[None], -1), above]))
