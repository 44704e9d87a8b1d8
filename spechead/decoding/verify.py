"""The rules that accept drafts of a tree.

Ranked drafts depend on the text alone and are accepted by exact match with the target's own draw. Sampled drafts may
also be verified by rejection or, on chains, by block verification, which accept more because they use the distribution
that each draft was drawn from. On ranked drafts these two would change the distribution of the text.

Legend: N nodes of a tree, V vocabulary; p the target's distribution after a node, q what its children were drawn from.
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
    """The drafts accepted in one pass."""

    path: list[int]  # accepted nodes, the root first
    tokens: list[int]  # to commit: the tokens of path[1:], then the bonus token


def exact_match(tree: Tree, drawn: Tensor) -> Accepted:
    """Accept drafts that equal the target's own draw: from the root, go to the child with the token drawn at the node.

    `drawn` int64 [N]: one token for each node, drawn from the target's distribution after it (greedy: its argmax). The
    drawn token that no child has is the bonus. Draws are independent of the drafts, so that the text is that of plain
    decoding, whatever was drafted: lossless. A draft x is accepted with probability p(x), else the bonus follows p with
    x removed and renormalised, which is the rule of EAGLE-2 (arXiv 2406.16858) in one step.
    """
    tokens, parents, choice = torch.stack([tree.tokens, tree.parents, drawn]).tolist()  # one synchronisation
    path, committed = [0], [choice[0]]
    for node in range(1, len(tokens)):  # parents come first, so one sweep walks the whole path
        if parents[node] == path[-1] and tokens[node] == committed[-1]:
            path.append(node)
            committed.append(choice[node])
    return Accepted(path, committed)


def rejection(tree: Tree, p: Tensor, random: RandomSource) -> Accepted:
    """Speculative sampling (arXiv 2211.17192, algorithm 1; 2302.01318, algorithm 2), on trees child after child
    (SpecInfer, arXiv 2305.09781) with siblings drawn without replacement (Sequoia, arXiv 2402.12374).

    A child x is accepted with probability min(1, p(x) / q(x)). Else p becomes the residual, max(p - q, 0) renormalised,
    and q the distribution of the next sibling, q without x renormalised. A sibling of probability 0 in q (x drafted
    twice) is skipped. Lossless.

    p [N, V], computed in its dtype. Raises UserError where drafts were not sampled.
    """
    tokens, parents, p, q = _sampled(tree, p)
    path = [0]
    residual, proposal = p[0], q[0]  # [V] the next token must follow the one; the next child was drawn from the other
    for node in range(1, len(tokens)):  # parents come first, so one sweep walks the whole path
        x = tokens[node]
        if parents[node] != path[-1] or proposal[x] == 0:
            continue
        if random.bernoulli(min(1.0, float(residual[x] / proposal[x]))):
            path.append(node)
            residual, proposal = p[node], q[node]
        else:
            rest = _normalised((residual - proposal).clamp(min=0))  # [V]
            residual = rest if rest.any() else residual  # where p = q, only rounding rejects, and the rest is empty
            proposal = _normalised(proposal.index_fill(0, torch.tensor(x), 0))
    return Accepted(path, [tokens[node] for node in path[1:]] + [random.categorical(residual)])


def block(tree: Tree, p: Tensor, random: RandomSource) -> Accepted:
    """Block verification of a chain (arXiv 2403.10444, algorithm 2): the longest prefix that is accepted as a whole.
    On average it accepts at least as many drafts as `rejection`. Lossless.

    With r_0 = 1, r_i = min(1, r_{i-1} p(x_i) / q(x_i)) and s_i = sum over x of max(r_i p(x) - q(x), 0), the prefix of
    i drafts is accepted with probability s_i / (s_i + 1 - r_i), and the bonus after it follows that positive part.
    After the last draft q is zero, so that the probability is r_i and the bonus follows p.

    p [N, V], computed in its dtype. Raises UserError where the tree branches or drafts were not sampled.
    """
    tokens, parents, p, q = _sampled(tree, p)
    if parents != list(range(-1, len(tokens) - 1)):
        raise UserError("option rule: block needs a chain; use a tree such as chain:4, or the rule rejection")
    q[-1] = 0
    length, bonus, r = 0, p[0], 1.0
    for i, x in enumerate(tokens):
        if i > 0:
            r = min(r * float(p[i - 1, x] / q[i - 1, x]), 1.0)
        positive = (r * p[i] - q[i]).clamp(min=0)  # [V]
        s = float(positive.sum())
        weight = s + (1 - r)  # in brackets, so that s / weight is exactly 1 for r = 1
        if weight > 0 and random.bernoulli(s / weight):  # weight 0: p = q, and a longer prefix is certain
            length, bonus = i, positive
    return Accepted(list(range(length + 1)), tokens[1 : length + 1] + [random.categorical(bonus)])


def typical(tree: Tree, p: Tensor, random: RandomSource, epsilon: float = 0.09, delta: float = 0.3) -> Accepted:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1). LOSSY: the text does not follow the target's
    distribution, except where p is one-hot (greedy).

    A draft x passes if p(x) > min(epsilon, delta exp(-H(p))), H being p's entropy in nats. Of the paths that pass, the
    deepest is accepted, of equal ones the likeliest; the bonus is drawn from p. p [N, V] after temperature. For ranked
    and for sampled drafts.
    """
    tokens, parents = torch.stack([tree.tokens, tree.parents]).tolist()
    p = p.cpu()
    least = (delta * torch.special.entr(p).sum(-1).neg().exp()).clamp(max=epsilon).tolist()  # [N]
    probability = [1.0, *p[parents[1:], tokens[1:]].tolist()]  # [N] p(x) of each draft x
    passing = {0: (0, 0.0)}  # depth and log-probability of each node whose path passes
    for node in range(1, len(tokens)):
        if parents[node] in passing and probability[node] > least[parents[node]]:
            depth, total = passing[parents[node]]
            passing[node] = (depth + 1, total + math.log(probability[node]))
    path = [max(passing, key=passing.__getitem__)]
    while path[0]:
        path.insert(0, parents[path[0]])
    return Accepted(path, [tokens[node] for node in path[1:]] + [random.categorical(p[path[-1]])])


@dataclass(frozen=True)
class Rule:
    """A rule and its properties."""

    function: Callable[..., Accepted]  # (tree, p, random), except exact_match: (tree, drawn)
    lossless: bool  # the text is distributed as the target's own
    sampled: bool  # needs drafts that were sampled


RULES = {
    "exact_match": Rule(exact_match, lossless=True, sampled=False),
    "rejection": Rule(rejection, lossless=True, sampled=True),
    "block": Rule(block, lossless=True, sampled=True),
    "typical": Rule(typical, lossless=False, sampled=False),
}


def _sampled(tree: Tree, p: Tensor) -> tuple[list[int], list[int], Tensor, Tensor]:
    """Tokens and parents [N], p and q [N, V] on the CPU, q in p's dtype with rows of sum 1 (leaves: 0)."""
    tokens, parents = torch.stack([tree.tokens, tree.parents]).tolist()  # waits for the device, the others only copy
    p = p.cpu()
    q = torch.zeros_like(p) if tree.drawn_from is None else tree.drawn_from.to("cpu", p.dtype)
    if not q[parents[1:], tokens[1:]].all():
        raise UserError(
            "option rule: rejection and block need sampled drafts, but the tree contains ranked ones; "
            "set draft_temperature above 0, or use the rule exact_match"
        )
    return tokens, parents, p, _normalised(q)


def _normalised(weights: Tensor) -> Tensor:
    """Weights [..., V] divided by their sum; rows of zeros stay zeros."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)
