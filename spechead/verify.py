"""Accept the path of a tree that the target itself would have written. Knows nothing of models, caches or text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spechead.tree import Tree


@dataclass
class Accepted:
    """The outcome of one pass."""

    path: list[int]  # accepted nodes, the root first
    tokens: list[int]  # the tokens committed: those of path[1:], then the bonus token


def accept(tree: Tree, drawn: Tensor) -> Accepted:
    """Follow the target's own draw: from the root, go to the child that carries the token drawn at the current node.

    `drawn` int64 [N] holds at each node one token drawn from the target's distribution behind that node (greedy: its
    argmax). The token that no child carries is the bonus. The draw never looks at the drafts, so whatever was drafted,
    the text is a plain decoding's. For a deterministic draft x this accepts with p(x), else the bonus follows p with x
    removed and renormalised: the rule of EAGLE-2 and -3 in one step.
    """
    tokens, parents, choice = torch.stack([tree.tokens, tree.parents, drawn]).tolist()  # one synchronisation
    path, committed = [0], [choice[0]]
    for node in range(1, len(tokens)):  # parents come first, so one sweep walks the whole path
        if parents[node] == path[-1] and tokens[node] == committed[-1]:
            path.append(node)
            committed.append(choice[node])
    return Accepted(path, committed)
