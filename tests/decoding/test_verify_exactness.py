"""Which rules preserve the target's distribution, computed exactly.

A toy target and a toy draft model have a random distribution after each prefix of at most two tokens. A tree of depth
two is grown and verified, and the target completes the text to three tokens. Every outcome of every coin and draw
is walked, with its probability, through the code that runs in production; the joint distribution of the three tokens
must be the target's own.

Legend: V tokens, N nodes of a tree. Prefixes are numbered as in a heap: row 0 is the empty one, row V*r + 1 + x is
row r's prefix followed by x; a table [1+V+V*V, V] holds a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from spechead.decoding.grow import grow
from spechead.decoding.random_source import RandomSource
from spechead.decoding.sampling import Drawing, warp
from spechead.decoding.tree import Dynamic, Plan, Static, Tree, chain
from spechead.decoding.verify import Accepted, block, exact_match, rejection, typical

V = 5
T = TypeVar("T")
Draft = Callable[[RandomSource], Tree]
Verify = Callable[[Tree, Tensor, RandomSource], Accepted]

SHAPES = {
    "1x1": chain(2),
    "2x1": Static(((0,), (1,), (0, 0), (1, 0))),
    "2x2": Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))),
    "uneven": Static(((0,), (1,), (1, 0), (1, 1))),
}
# Temperature, top-k and top-p of the target, and of the draft model: three tokens at most, so that 2x2 stays small.
WARPERS = {
    "plain": ((1.0, 0, 1.0), (1.0, 3, 1.0)),
    "cold target": ((0.4, 0, 1.0), (1.5, 3, 1.0)),
    "top-k": ((1.3, 3, 1.0), (0.7, 2, 1.0)),
    "top-p": ((1.0, 0, 0.8), (1.0, 3, 0.7)),
    "both": ((0.7, 4, 0.9), (1.2, 3, 0.9)),
}
EXACT, BIASED = 1e-9, 1e-3


class Everything:
    """A `RandomSource` that takes each outcome once.

    The code is run again for each, the last choice that has outcomes left taking its next one.
    """

    def __init__(self) -> None:
        self._open: list[list[tuple[int, float]]] = []  # of each choice, the outcomes not done; the last is taken
        self._at = 0

    def bernoulli(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return bool(self._take([1 - probability, probability]))

    def categorical(self, weights: Tensor) -> int:
        weights = weights.double()
        return self._take((weights / weights.sum()).tolist())

    def _take(self, shares: list[float]) -> int:
        if self._at == len(self._open):
            self._open.append([(outcome, share) for outcome, share in enumerate(shares) if share > 1e-30])
        self._at += 1
        outcome, share = self._open[self._at - 1][-1]
        self.weight *= share
        return outcome

    def walk(self, run: Callable[[RandomSource], T]) -> Iterator[tuple[float, T]]:
        """Each outcome of `run` with its probability; the same outcome may come more than once."""
        while True:
            self._at, self.weight = 0, 1.0
            result = run(self)
            yield self.weight, result
            while self._open and len(self._open[-1]) == 1:
                self._open.pop()
            if not self._open:
                return
            self._open[-1].pop()


def model(seed: int, warpers: tuple[float, int, float] = (1.0, 0, 1.0)) -> Tensor:
    """A random model's log-probabilities, float64 [1+V+V*V, V]."""
    logits = 1.5 * torch.randn(1 + V + V * V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return warp(logits, *warpers).log_softmax(-1)


def ranked(plan: Plan, logq: Tensor) -> Draft:
    """The best drafts, whatever happens."""
    logq = logq.float()
    return lambda random: grow(plan, torch.tensor(0), logq[:1], None, lambda tokens, *_: logq[1 + tokens])


def sampled(plan: Plan, logq: Tensor) -> Draft:
    """Drafts drawn from the draft model."""
    logq = logq.float()

    def draft(random: RandomSource) -> Tree:
        drawing = Drawing(1.0, random)
        return grow(plan, torch.tensor(0), logq[:1], None, lambda tokens, *_: logq[1 + tokens], drawing, V)

    return draft


def matched(tree: Tree, p: Tensor, random: RandomSource) -> Accepted:
    """`exact_match` with one noise for all nodes of a depth, as `Sampler.draw` has it: a point in [0, 1) falls into one
    token's span at each of them."""
    edges = p.cumsum(-1)
    edges = edges / edges[:, -1:]  # [N, V]
    drawn = torch.zeros(len(tree), dtype=torch.long)
    for depth in range(int(tree.depths.max()) + 1):
        level = tree.depths == depth
        marks = torch.cat([torch.zeros(1, dtype=p.dtype), edges[level].flatten().unique()])
        piece = random.categorical(marks.diff())  # between two marks, no node's token changes
        drawn[level] = (edges[level] <= marks[piece : piece + 2].mean()).sum(-1)
    return exact_match(tree, drawn)


def at_nodes(tree: Tree, p: Tensor) -> Tensor:
    """The target's distribution after each node, [N, V]."""
    rows = [0]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        rows.append(V * rows[parent] + 1 + token)
    return p[rows]


def completed(tokens: list[int], p: Tensor) -> Tensor:
    """The target's distribution of what is missing of three tokens: [V] * missing."""
    row = 0
    for token in tokens:
        row = V * row + 1 + token
    if len(tokens) == 3:
        return torch.tensor(1.0, dtype=p.dtype)
    if len(tokens) == 2:
        return p[row]
    return p[row][:, None] * p[V * row + 1 : V * row + 1 + V]


def error(draft: Draft, rule: Verify, logp: Tensor) -> float:
    """The largest difference between the target's joint distribution of three tokens and that of the decoded text."""
    p = logp.exp()
    written = torch.zeros(V, V, V, dtype=p.dtype)
    for weight, tree in Everything().walk(draft):
        nodes = at_nodes(tree, p)
        for share, result in Everything().walk(partial(rule, tree, nodes)):
            written[tuple(result.tokens)] += weight * share * completed(result.tokens, p)
    own = p[0][:, None, None] * p[1 : 1 + V][:, :, None] * p[1 + V :].view(V, V, V)
    return float((written - own).abs().max())


def drafts_accepted(draft: Draft, rule: Verify, logp: Tensor) -> float:
    """Expected number of accepted drafts."""
    p, kept = logp.exp(), 0.0
    for weight, tree in Everything().walk(draft):
        nodes = at_nodes(tree, p)
        for share, result in Everything().walk(partial(rule, tree, nodes)):
            kept += weight * share * (len(result.path) - 1)
    return kept


def test_everything_is_walked_once_with_its_probability() -> None:
    def run(random: RandomSource) -> tuple[bool, int]:
        heads = random.bernoulli(0.25)
        return heads, random.categorical(torch.tensor([1.0, 3.0, 0.0])) if heads else 7

    found = {outcome: weight for weight, outcome in Everything().walk(run)}
    assert found == {(False, 7): 0.75, (True, 0): 0.0625, (True, 1): 0.1875}


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS.keys())
@pytest.mark.parametrize("plan", [*SHAPES.values(), Dynamic(nodes=5, depth=2, topk=3)], ids=[*SHAPES, "dynamic"])
def test_exact_match_is_exact_on_ranked_drafts(plan: Plan, warpers: tuple) -> None:
    assert error(ranked(plan, model(1, warpers[1])), matched, model(0, warpers[0])) < EXACT


@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES.keys())
def test_exact_match_is_exact_on_sampled_drafts(plan: Plan) -> None:
    """This pairing of a rule with the other kind of drafts only keeps fewer of them: the draw never looks at them."""
    logp, logq = model(0), model(1, (1.0, 2, 1.0))
    assert error(sampled(plan, logq), matched, logp) < EXACT


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS.keys())
@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES.keys())
def test_rejection_is_exact_on_sampled_drafts(plan: Plan, warpers: tuple) -> None:
    assert error(sampled(plan, model(1, warpers[1])), rejection, model(0, warpers[0])) < EXACT


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS.keys())
def test_block_is_exact_on_sampled_chains(warpers: tuple) -> None:
    assert error(sampled(chain(2), model(1, warpers[1])), block, model(0, warpers[0])) < EXACT


@pytest.mark.parametrize("rule,shape", [(rejection, "1x1"), (rejection, "2x1"), (rejection, "uneven"), (block, "1x1")])
def test_drafts_from_the_whole_vocabulary_are_exact(rule: Verify, shape: str) -> None:
    assert error(sampled(SHAPES[shape], model(1)), rule, model(0)) < EXACT


def test_all_tokens_as_siblings_are_exact() -> None:
    plan = Static(tuple((rank,) for rank in range(V)))
    assert error(sampled(plan, model(1)), rejection, model(0)) < EXACT
    assert drafts_accepted(sampled(plan, model(1)), rejection, model(0)) == pytest.approx(1)


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_draft_model_that_is_the_target_is_always_right(rule: Verify) -> None:
    """But for the rounding of q to float32, through which the text still follows p."""
    draft = sampled(chain(2), model(0))
    assert error(draft, rule, model(0)) < EXACT
    assert drafts_accepted(draft, rule, model(0)) == pytest.approx(2)


@pytest.mark.parametrize("rule", [rejection, block, typical])
def test_a_greedy_target_gives_its_one_text(rule: Verify) -> None:
    greedy = torch.nn.functional.one_hot(model(0).argmax(-1), V).double().log()
    assert error(sampled(SHAPES["1x1"], model(1)), rule, greedy) < EXACT
    assert rule is block or error(sampled(SHAPES["2x1"], model(1)), rule, greedy) < EXACT


@pytest.mark.parametrize("rule,shape", [(rejection, "1x1"), (rejection, "2x1"), (block, "1x1")])
def test_stopping_before_a_draw_is_exact(rule: Verify, shape: str) -> None:
    """A floor looks at the drafts drawn so far, never at the one to come."""
    plan = replace(SHAPES[shape], floor=0.2)
    draft = sampled(plan, model(1))
    sizes = {len(tree) for _, tree in Everything().walk(draft)}
    assert len(sizes) > 1 and max(sizes) == 1 + plan.nodes  # some nodes are expanded, some are not
    assert error(draft, rule, model(0)) < EXACT


def test_ranks_that_a_plan_skips_are_exact() -> None:
    assert error(sampled(Static(((1,), (4,), (1, 2))), model(1)), rejection, model(0)) < EXACT


@pytest.mark.parametrize("rule", [rejection, block])
def test_cutting_a_chain_to_the_room_left_is_exact(rule: Verify) -> None:
    draft = sampled(chain(2), model(1))
    assert error(lambda random: draft(random).pruned(1), rule, model(0)) < EXACT

    def with_its_last_row(random: RandomSource) -> Tree:  # what the next draft would have been drawn from has no effect
        tree = draft(random)
        assert tree.drawn_from is not None
        return Tree(tree.tokens[:2], tree.parents[:2], tree.drawn_from[:2])

    assert error(with_its_last_row, rule, model(0)) < EXACT


def test_siblings_drawn_with_replacement_are_exact() -> None:
    """A token drafted twice is passed over; the next new one is distributed as if it had not been drawn again."""
    logq = model(1)

    def draft(random: RandomSource) -> Tree:
        q = logq[:1].exp().float()
        tokens = [random.categorical(q[0]) for _ in range(3)]
        return Tree(torch.tensor([0, *tokens]), torch.tensor([-1, 0, 0, 0]), torch.cat([q, torch.zeros(3, V)]))

    assert error(draft, rejection, model(0)) < EXACT


# What the tests above would not forgive.


def as_if_sampled(draft: Draft, logq: Tensor) -> Draft:
    """Ranked drafts that claim to have been drawn."""

    def claim(random: RandomSource) -> Tree:
        tree = draft(random)
        return replace(tree, drawn_from=at_nodes(tree, logq.exp().float()))

    return claim


def zeroing(tree: Tree, p: Tensor, random: RandomSource) -> Accepted:
    """Sampled drafts accepted as in `rejection`, but with the remedy of ranked ones: a refused token is only struck."""
    assert tree.drawn_from is not None
    path, wanted = [0], p[0]
    for node in range(1, len(tree)):
        x, at = int(tree.tokens[node]), path[-1]
        if tree.parents[node] == at:
            if random.bernoulli(min(1.0, float(wanted[x] / tree.drawn_from[at, x]))):
                path.append(node)
                wanted = p[node]
            else:
                wanted = wanted.index_fill(0, tree.tokens[node], 0)
                wanted = wanted / wanted.sum()
    return Accepted(path, [int(tree.tokens[node]) for node in path[1:]] + [random.categorical(wanted)])


def not_renormalised(tree: Tree, p: Tensor, random: RandomSource) -> Accepted:
    """`rejection` that verifies each sibling by the q of the first."""
    assert tree.drawn_from is not None
    path, wanted = [0], p[0]
    for node in range(1, len(tree)):
        x, q = int(tree.tokens[node]), tree.drawn_from[path[-1]].to(p)
        q = q / q.sum()  # rounded to float32 before
        if tree.parents[node] == path[-1]:
            if random.bernoulli(min(1.0, float(wanted[x] / q[x]))):
                path.append(node)
                wanted = p[node]
            else:
                wanted = (wanted - q).clamp(min=0)
                wanted = wanted / wanted.sum()
    return Accepted(path, [int(tree.tokens[node]) for node in path[1:]] + [random.categorical(wanted)])


@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES.keys())
def test_rejection_on_ranked_drafts_would_be_biased(plan: Plan) -> None:
    logq = model(1)
    assert error(as_if_sampled(ranked(plan, logq), logq), rejection, model(0)) > BIASED


def test_block_on_ranked_drafts_would_be_biased() -> None:
    logq = model(1)
    assert error(as_if_sampled(ranked(chain(2), logq), logq), block, model(0)) > BIASED


@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES.keys())
def test_striking_refused_tokens_of_sampled_drafts_would_be_biased(plan: Plan) -> None:
    assert error(sampled(plan, model(1, (1.0, 3, 1.0))), zeroing, model(0)) > BIASED


def test_siblings_verified_by_the_same_q_would_be_biased() -> None:
    logp, logq = model(0), model(1, (1.0, 3, 1.0))
    assert error(sampled(SHAPES["1x1"], logq), not_renormalised, logp) < EXACT  # on a chain it is the rule itself
    assert error(sampled(SHAPES["2x1"], logq), not_renormalised, logp) > BIASED


def test_sorting_sampled_siblings_would_be_biased() -> None:
    draft = sampled(Static(((0,), (1,))), model(1))

    def best_first(random: RandomSource) -> Tree:
        tree = draft(random)
        assert tree.drawn_from is not None
        order = tree.drawn_from[0, tree.tokens[1:]].argsort(descending=True)
        return replace(tree, tokens=torch.cat([tree.tokens[:1], tree.tokens[1:][order]]))

    assert error(draft, rejection, model(0)) < EXACT
    assert error(best_first, rejection, model(0)) > BIASED


@pytest.mark.parametrize("rule", [rejection, block])
def test_dropping_a_draft_that_was_drawn_would_be_biased(rule: Verify) -> None:
    draft = sampled(chain(1), model(1))

    def likely_or_none(random: RandomSource) -> Tree:
        tree = draft(random)
        assert tree.drawn_from is not None
        return tree if tree.drawn_from[0, tree.tokens[1]] > 0.2 else tree.pruned(0)

    assert error(likely_or_none, rule, model(0)) > BIASED


@pytest.mark.parametrize("rule", [rejection, block])
def test_another_q_than_the_drafts_were_drawn_from_would_be_biased(rule: Verify) -> None:
    draft, other = sampled(chain(2), model(1, (0.5, 0, 1.0))), model(1)
    assert error(as_if_sampled(draft, other), rule, model(0)) > BIASED


@pytest.mark.parametrize("draft", [ranked, sampled])
def test_typical_is_not_exact(draft: Callable[[Plan, Tensor], Draft]) -> None:
    assert error(draft(SHAPES["2x1"], model(1, (1.0, 3, 1.0))), typical, model(0)) > BIASED


# How many drafts are kept.


@pytest.mark.parametrize("seed", range(5))
def test_rejection_keeps_the_overlap_of_p_and_q(seed: int) -> None:
    logp, logq = model(seed), model(seed + 100)
    overlap = torch.minimum(logp[0].exp(), logq[0].exp()).sum()
    for rule in (rejection, block):
        assert drafts_accepted(sampled(chain(1), logq), rule, logp) == pytest.approx(float(overlap), abs=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_block_keeps_at_least_as_many_as_rejection(seed: int) -> None:
    logp, draft = model(seed), sampled(chain(2), model(seed + 100, (1.0, 3, 1.0)))
    by_block, by_rejection = drafts_accepted(draft, block, logp), drafts_accepted(draft, rejection, logp)
    by_exact_match = drafts_accepted(draft, matched, logp)
    assert by_exact_match < by_rejection + 1e-9 and by_rejection < by_block + 1e-9


def test_the_example_of_the_block_paper() -> None:
    """Two tokens whatever came before, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 and 11/9 are kept."""
    p, q = torch.tensor([[1.0, 2, 0, 0, 0], [2.0, 1, 0, 0, 0]], dtype=torch.float64).expand(31, 2, V).unbind(1)
    logp, draft = (p / 3).log(), sampled(chain(2), (q / 3).log())
    assert drafts_accepted(draft, rejection, logp) == pytest.approx(10 / 9, abs=1e-6)
    assert drafts_accepted(draft, block, logp) == pytest.approx(11 / 9, abs=1e-6)
