"""Sampled drafts through the whole loop: the texts are distributed as the target's own.

Legend: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spechead.decoding.generate import Speculation, generate, generate_batch
from spechead.decoding.sampling import Drawing, RepetitionPenalty, Sampler
from spechead.decoding.tree import Plan, Static, Tree, chain
from spechead.target.model import Target, TargetOutput
from tests.helpers.heads import by_hand, prompts_of
from tests.helpers.targets import VOCAB, make_target

PROMPT = [5, 6, 7]
LENGTH = 3  # tokens of a text: one from the prefill, two from passes
TOP_K = 4
TREE = Static(((0,), (1,), (0, 0)))
RULES = [("rejection", TREE), ("block", chain(2))]


class Guesser:
    """Draws chains from a fixed table: what follows each token, right in part."""

    taps: Sequence[int] = ()
    branches = True
    tree: Plan = chain(2)

    def __init__(self, logits: Tensor) -> None:  # [V, V]
        self._logp = logits.log_softmax(-1)

    def new_state(self, prompt: Tensor) -> None:
        return None

    def propose(
        self, state: None, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        assert drawing is not None and isinstance(plan, Static)
        tokens, parents = [int(fresh[-1])], [-1]
        numbers: dict[tuple[int, ...], int] = {(): 0}
        drawn_from = torch.zeros(len(plan.choices) + 1, VOCAB)
        for path, siblings in itertools.groupby(plan.choices, key=lambda choice: choice[:-1]):
            group = list(siblings)
            ids, q = drawing.draw(self._logp[tokens[numbers[path]]][None], len(group))
            drawn_from[numbers[path]] = q[0]
            for choice, token in zip(group, ids[0].tolist(), strict=True):
                numbers[choice] = len(tokens)
                tokens.append(token)
                parents.append(numbers[path])
        return Tree(torch.tensor(tokens), torch.tensor(parents), drawn_from)


def after_each_token(target: Target) -> Tensor:
    """The target's logits after every token on its own: [V, V]."""
    return torch.stack([target.logits(target.forward(torch.tensor([[token]])).hidden[0, -1]) for token in range(VOCAB)])


def joint(target: Target, penalty: float) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens, from the model alone."""
    sampler = Sampler(1.0, TOP_K)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in found.items():
            ids = torch.tensor([PROMPT + list(text)])
            logits = RepetitionPenalty(penalty)(ids, target.logits(target.forward(ids).hidden[0, -1:]))
            for token, p in enumerate(sampler.probabilities(logits.double())[0].tolist()):
                if p > 0:
                    longer[*text, token] = weight * p
        found = longer
    return found


def chi_square_limit(cells: int) -> float:
    """The 0.01 % point of chi-square with `cells` - 1 degrees of freedom (Wilson and Hilferty's approximation)."""
    degrees = cells - 1
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def statistic(
    target: Target, rule: str, tree: Plan, draws: int, penalty: float = 1.0, batch: int = 500
) -> tuple[float, int]:
    """Chi-square of `draws` texts against the target's own distribution, and its cells; rare texts share one."""
    expected = joint(target, penalty)
    known = torch.zeros(VOCAB, VOCAB)
    for text in expected:
        known[[PROMPT[-1], *text[:-1]], list(text)] = 4.0  # so that drafts are often right
    drafter, speculation = Guesser(after_each_token(target) * 0.3 + known), Speculation(tree, rule, 0.9)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(expected, 0)
    accepted = 0
    for start in range(0, draws, batch):
        samplers = [Sampler(1.0, TOP_K, seed=start + i, repetition_penalty=penalty) for i in range(batch)]
        rows = generate_batch(
            target, [PROMPT] * batch, drafter, speculation=speculation, max_new_tokens=LENGTH, samplers=samplers
        )
        for row in rows:
            counts[tuple(row.tokens)] += 1  # a text of probability 0 is a KeyError
            accepted += sum(row.stats.accepted)
    assert accepted > 0.2 * draws
    rare = [text for text, p in expected.items() if p * draws < 10]
    cells = [(counts[text], p * draws) for text, p in expected.items() if p * draws >= 10]
    if rare:
        cells.append((sum(counts[text] for text in rare), sum(expected[text] for text in rare) * draws))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells)


@pytest.mark.parametrize(("rule", "tree"), RULES)
@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_two_thousand_texts(rule: str, tree: Plan, penalty: float) -> None:
    target = make_target("llama", seed=2)
    found, cells = statistic(target, rule, tree, 2000, penalty)
    assert cells > 5 and found < chi_square_limit(cells)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_two_hundred_thousand_texts(rule: str, tree: Plan) -> None:
    target = make_target("llama", seed=2)
    found, cells = statistic(target, rule, tree, 200_000)
    assert cells > 20 and found < chi_square_limit(cells)


def guesser(target: Target, texts: list[list[int]]) -> Guesser:
    """Often right where one of the texts is written."""
    known = torch.zeros(VOCAB, VOCAB)
    for text in texts:
        known[text[:-1], text[1:]] = 6.0
    return Guesser(after_each_token(target) * 0.3 + known)


@pytest.mark.parametrize(("rule", "tree"), RULES)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_greedy_target_writes_its_text_whatever_is_drawn(
    target: Target, rule: str, tree: Plan, penalty: float
) -> None:
    sampler = Sampler(repetition_penalty=penalty, seed=1)
    prompt = prompts_of(target)[0]
    expected = by_hand(target, prompt, sampler, 30)
    drafter, speculation = guesser(target, [prompt[-1:] + expected]), Speculation(tree, rule, 0.9)
    found = generate(target, prompt, drafter, speculation=speculation, max_new_tokens=30, sampler=sampler)
    assert found.tokens == expected and sum(found.stats.accepted) > 8


@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_rows_of_a_batch_are_single_texts(target: Target, rule: str, tree: Plan) -> None:
    """Prompts of unequal length, each with its own seed and warpers; the same seed gives the same text."""
    prompts = prompts_of(target)

    def samplers() -> list[Sampler]:
        return [
            Sampler(0.3, seed=1),
            Sampler(0.3, TOP_K, 0.9, seed=1, repetition_penalty=1.05),
            Sampler(0.4, seed=4, min_p=0.02),
        ]

    near = [prompt[-1:] + generate(target, prompt, max_new_tokens=20).tokens for prompt in prompts]
    drafter, speculation = guesser(target, near), Speculation(tree, rule, 0.9)
    rows = generate_batch(target, prompts, drafter, speculation=speculation, max_new_tokens=20, samplers=samplers())
    for prompt, sampler, row in zip(prompts, samplers(), rows, strict=True):
        alone = generate(target, prompt, drafter, speculation=speculation, max_new_tokens=20, sampler=sampler)
        assert row.tokens == alone.tokens
        assert row.stats.drafted == alone.stats.drafted and row.stats.accepted == alone.stats.accepted
        assert sum(row.stats.accepted) > 1
