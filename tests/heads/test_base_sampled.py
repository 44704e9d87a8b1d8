"""Heads that sample their drafts: they tell what they were drawn from, and every rule then keeps the target's text.

That the rules are exact where drafts tell the truth about themselves is shown in test_exactness.py.

Legend: D draft vocabulary, V target vocabulary, N nodes of a tree, P tokens of a text.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spechead.decoding.generate import Speculation, generate, generate_batch
from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing, Sampler
from spechead.decoding.tree import Static, chain
from spechead.heads import HEADS, Head
from spechead.target.model import Target, TargetOutput
from tests.helpers.heads import TREE, by_hand, make_head, overfitted
from tests.helpers.targets import VOCAB

TEMPERATURE = 1.7  # of the drafts
RULES = [("rejection", TREE), ("rejection", chain(4)), ("block", chain(4)), ("exact_match", TREE)]


class ForcedDrawing(Drawing):
    """Draws the given tokens, and records the distributions."""

    def __init__(self, draft_ids: list[int]) -> None:
        super().__init__(1.0, SeededSource(0))
        self.seen: list[Tensor] = []  # each log-probabilities [D]
        self._draft_ids = draft_ids

    def draw(self, logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.seen.append(logp[0])
        return torch.tensor([[self._draft_ids[len(self.seen) - 1]]]), logp.softmax(-1)


def own_q(head: Head, text: Tensor, out: TargetOutput, path: list[int]) -> Tensor:
    """What the head says behind `text` int64 [P] and the drafts `path`, when it has drafted nothing else: [V]."""
    ids = torch.arange(head.draft_size) * 2  # the vocabulary that `make_head` gives it
    drawing = ForcedDrawing([token // 2 for token in path] + [0])
    head.propose(head.new_state(text[:-1]), text[1:], out, chain(len(path) + 1), drawing)
    assert len(drawing.seen) == len(path) + 1
    return torch.zeros(VOCAB).scatter(0, ids, (drawing.seen[-1] / TEMPERATURE).softmax(-1))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("plan", [chain(4), TREE], ids=["chain", "tree"])
def test_sampled_drafts_come_with_their_distribution(target: Target, kind: str, plan: Static) -> None:
    head = make_head(kind, target, seed=5)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    text = torch.randint(3, VOCAB, (14,), generator=torch.Generator().manual_seed(1))
    out = target.forward(text[None, :-1], taps=head.taps)
    state, drawing = head.new_state(text[:6]), Drawing(TEMPERATURE, SeededSource(2))
    head.propose(state, text[1:10], out.rows(torch.arange(9)), plan, drawing)  # guesses that must be forgotten
    tree = head.propose(state, text[10:], out.rows(torch.arange(9, 13)), plan, drawing)
    assert tree.drawn_from is not None and tree.drawn_from.shape == (len(tree), VOCAB)
    assert len(tree) == 1 + len(plan.choices)
    inner = set(tree.parents.tolist())
    for node in range(len(tree)):
        path = tree.tokens[tree.visible[node]][1:].tolist()
        expected = own_q(head, text, out, path) if node in inner else torch.zeros(VOCAB)
        assert torch.allclose(tree.drawn_from[node], expected, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("rule", "plan"), RULES, ids=lambda value: str(value)[:9])
def test_a_greedy_target_writes_its_text(kind: str, rule: str, plan: Static) -> None:
    """Whatever is drawn; with a penalty, which has each node see its own prefix."""
    target, head, prompts = overfitted(kind)
    for penalty in (1.0, 1.4):
        sampler = Sampler(repetition_penalty=penalty, seed=3)
        expected = by_hand(target, prompts[0], sampler, 22)
        found = generate(
            target,
            prompts[0],
            head,
            speculation=Speculation(plan, rule, 0.5),
            max_new_tokens=22,
            sampler=sampler,
        )
        assert found.tokens == expected
        assert penalty > 1 or sum(found.stats.accepted) > 3


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("rule", "plan"), RULES, ids=lambda value: str(value)[:9])
def test_rows_of_a_batch_are_single_texts(kind: str, rule: str, plan: Static) -> None:
    target, head, prompts = overfitted(kind)
    speculation = Speculation(plan, rule, 0.8)

    def samplers() -> list[Sampler]:
        return [  # cold, so that texts stay near those that the head knows
            Sampler(0.02, seed=1),
            Sampler(0.1, 20, 0.9, seed=1, repetition_penalty=1.05),
            Sampler(0.1, seed=5, min_p=0.02),
        ]

    rows = generate_batch(target, prompts, head, speculation=speculation, max_new_tokens=20, samplers=samplers())
    for prompt, sampler, row in zip(prompts, samplers(), rows, strict=True):
        alone = generate(target, prompt, head, speculation=speculation, max_new_tokens=20, sampler=sampler)
        assert row.tokens == alone.tokens
        assert row.stats.drafted == alone.stats.drafted and row.stats.accepted == alone.stats.accepted
    assert sum(sum(row.stats.accepted) for row in rows) > 5
