"""Which drafts of a tree stay: one rule for each kind of drafts.

Ranked drafts depend on the text alone and are judged by the target's own draw. Sampled drafts may also be judged by
rejection or, on chains, by block verification, which keep more of them because they know what each was drawn from.
Used on ranked drafts, these two would change the text's distribution. Knows nothing of models, caches or text.

Legend: N nodes of a tree, V vocabulary; p what the target writes behind a node, q what its children were drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spechead.decoding.random_source import RandomSource
from spechead.decoding.tree import Tree
from spechead.errors import UserError


@dataclass
class Accepted:
    """The outcome of one pass."""

    path: list[int]  # accepted nodes, the root first
    tokens: list[int]  # the tokens committed: those of path[1:], then the bonus token


def exact_match(tree: Tree, drawn: Tensor) -> Accepted:
    """Follow the target's own draw: from the root, go to the child that carries the token drawn at the current node.

    `drawn` int64 [N] holds at each node one token drawn from the target's distribution behind that node (greedy: its
    argmax). The token that no child carries is the bonus. The draw never looks at the drafts, so whatever was drafted,
    and however, the text is a plain decoding's: lossless. A draft x is accepted with p(x), else the bonus follows p
    with x removed and renormalised, which is the rule of EAGLE-2 (arXiv 2406.16858) in one step.
    """
    tokens, parents, choice = torch.stack([tree.tokens, tree.parents, drawn]).tolist()  # one synchronisation
    path, committed = [0], [choice[0]]
    for node in range(1, len(tokens)):  # parents come first, so one sweep walks the whole path
        if parents[node] == path[-1] and tokens[node] == committed[-1]:
            path.append(node)
            committed.append(choice[node])
    return Accepted(path, committed)


def rejection(tree: Tree, p: Tensor, chance: RandomSource) -> Accepted:
    """Speculative sampling (arXiv 2211.17192, algorithm 1; 2302.01318, algorithm 2), on trees child after child
    (SpecInfer, arXiv 2305.09781) with siblings drawn without replacement (Sequoia, arXiv 2402.12374).

    A child x is accepted with min(1, p(x) / q(x)). Else the text must follow the rest, max(p - q, 0) renormalised; the
    next sibling was drawn from q without x, renormalised, and is judged by these two. A sibling that q no longer holds
    (x drafted twice) has nothing to add and is passed over, which says nothing about the next. Lossless.

    p [N, V], computed in its dtype. Raises UserError where drafts were not sampled.
    """
    tokens, parents, p, q = _sampled(tree, p)
    path = [0]
    wanted, offered = p[0], q[0]  # [V] what the next token must follow, and what the next child was drawn from
    for node in range(1, len(tokens)):  # parents come first, so one sweep walks the whole path
        x = tokens[node]
        if parents[node] != path[-1] or offered[x] == 0:
            continue
        if chance.bernoulli(min(1.0, float(wanted[x] / offered[x]))):
            path.append(node)
            wanted, offered = p[node], q[node]
        else:
            rest = _shares((wanted - offered).clamp(min=0))  # [V]
            wanted = rest if rest.any() else wanted  # where p = q, only rounding rejects, and no rest is left
            offered = _shares(offered.index_fill(0, torch.tensor(x), 0))
    return Accepted(path, [tokens[node] for node in path[1:]] + [chance.categorical(wanted)])


def block(tree: Tree, p: Tensor, chance: RandomSource) -> Accepted:
    """Block verification of a chain (arXiv 2403.10444, algorithm 2): the longest prefix that passes, whatever came
    before it. Keeps at least as many drafts as `rejection` on average. Lossless.

    With r_0 = 1, r_i = min(1, r_{i-1} p(x_i) / q(x_i)) and s_i = sum over x of max(r_i p(x) - q(x), 0), the prefix of
    i drafts passes with s_i / (s_i + 1 - r_i), and the bonus behind it follows that positive part. Behind the last
    draft q is zero, so that it passes with r_i and the bonus follows p.

    p [N, V], computed in its dtype. Raises UserError where the tree branches or drafts were not sampled.
    """
    tokens, parents, p, q = _sampled(tree, p)
    if parents != list(range(-1, len(tokens) - 1)):
        raise UserError("the rule block judges chains only; use a tree such as chain:4, or the rule rejection")
    q[-1] = 0
    kept, bonus, r = 0, p[0], 1.0
    for i, x in enumerate(tokens):
        if i > 0:
            r = min(r * float(p[i - 1, x] / q[i - 1, x]), 1.0)
        positive = (r * p[i] - q[i]).clamp(min=0)  # [V]
        s = float(positive.sum())
        weight = s + (1 - r)  # the brackets keep s / weight at 1 for r = 1, however small s is
        if weight > 0 and chance.bernoulli(s / weight):  # weight 0: p = q, and the next draft passes for certain
            kept, bonus = i, positive
    return Accepted(list(range(kept + 1)), tokens[1 : kept + 1] + [chance.categorical(bonus)])


def typical(tree: Tree, p: Tensor, chance: RandomSource, epsilon: float = 0.09, delta: float = 0.3) -> Accepted:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). LOSSY: the text does not follow the target's
    distribution; only where p lies on one token (greedy) is it the target's.

    A draft x passes if p(x) > min(epsilon, delta exp(-H(p))), H being p's entropy in nats. Of the paths that pass, the
    deepest stays, of equals the likeliest; the bonus is drawn from p. p [N, V] after temperature. Judges any drafts.
    """
    tokens, parents = torch.stack([tree.tokens, tree.parents]).tolist()
    p = p.cpu()
    least = (delta * torch.special.entr(p).sum(-1).neg().exp()).clamp(max=epsilon).tolist()  # [N]
    found = [1.0, *p[parents[1:], tokens[1:]].tolist()]  # [N] p(x) of each draft x
    merit = {0: (0, 0.0)}  # of each node whose path passes: depth, log-probability
    for node in range(1, len(tokens)):
        if parents[node] in merit and found[node] > least[parents[node]]:
            depth, total = merit[parents[node]]
            merit[node] = (depth + 1, total + math.log(found[node]))
    path = [max(merit, key=merit.__getitem__)]
    while path[0]:
        path.insert(0, parents[path[0]])
    return Accepted(path, [tokens[node] for node in path[1:]] + [chance.categorical(p[path[-1]])])


@dataclass(frozen=True)
class Rule:
    """What to know before a rule is used."""

    function: Callable[..., Accepted]  # (tree, p, chance), but exact_match's
    lossless: bool  # the text is distributed as the target's own
    sampled: bool  # needs drafts that were sampled


RULES = {
    "exact_match": Rule(exact_match, lossless=True, sampled=False),
    "rejection": Rule(rejection, lossless=True, sampled=True),
    "block": Rule(block, lossless=True, sampled=True),
    "typical": Rule(typical, lossless=False, sampled=False),
}


def _sampled(tree: Tree, p: Tensor) -> tuple[list[int], list[int], Tensor, Tensor]:
    """Tokens and parents [N], p and q [N, V] on the CPU, q in p's dtype with rows of sum 1 (0: nothing was drawn)."""
    tokens, parents = torch.stack([tree.tokens, tree.parents]).tolist()  # waits for the device, the others only copy
    p = p.cpu()
    q = torch.zeros_like(p) if tree.drawn_from is None else tree.drawn_from.to("cpu", p.dtype)
    if not q[parents[1:], tokens[1:]].all():
        raise UserError(
            "the rules rejection and block judge sampled drafts, but the tree holds some that were ranked; "
            "let the drafter sample, or use the rule exact_match"
        )
    return tokens, parents, p, _shares(q)


def _shares(weights: Tensor) -> Tensor:
    """Weights [..., V] over their sum; zeros stay zeros."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)
