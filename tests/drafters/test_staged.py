"""Staged drafting proposes what its middle would alone, drawn or ranked, in fewer of the middle's forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spechead.decoding.generate import Speculation, generate
from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Dynamic, chain
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged, Tiny
from spechead.target.model import Target
from tests.drafters.test_draft_model import make_llama
from tests.helpers.drafters import HALF, NOTHING, TREE, RandomDrafter, prompt_of, record_sizes
from tests.helpers.targets import VOCAB, make_target


class RandomTrees(RandomDrafter):
    """Remembers nothing, so there is nothing to take back. Many of its trees hold the right token somewhere."""

    def rewind(self, state: None, length: int) -> None:
        pass


def tinies(middle: DraftModel) -> dict[str, Tiny]:
    branching = DraftModel(middle.draft, middle.draft)
    branching.tree = TREE
    return {
        "lookup": PromptLookup(),
        "wrong": DraftModel(middle.draft, make_target(seed=4)),
        "right": DraftModel(middle.draft, middle.draft),
        "right, a tree": branching,
        "random trees": RandomTrees(0),
    }


@pytest.mark.parametrize("name", ["lookup", "wrong", "right", "right, a tree", "random trees"])
@pytest.mark.parametrize("plan", [chain(1), chain(6), chain(6, floor=0.05), TREE], ids=str)
@pytest.mark.parametrize("drawn", [False, True])
def test_proposals_are_the_middles_own(target: Target, name: str, plan: Any, drawn: bool) -> None:
    middle = SelfSpeculative(target, HALF)
    staged = Staged(middle, tinies(middle)[name])
    text = torch.tensor(prompt_of(5) * 3 + prompt_of(15, seed=2))
    states = staged.new_state(text[:1]), middle.new_state(text[:1])
    for before, after in ((1, 2), (2, 12), (12, 13), (13, 22), (22, 30)):
        drawing = [Drawing(1.5, SeededSource(after)) if drawn else None for _ in range(2)]
        found = staged.propose(states[0], text[before:after], NOTHING, plan, drawing[0])
        alone = middle.propose(states[1], text[before:after], NOTHING, chain(plan.depth, plan.floor), drawing[1])
        assert found.tokens.tolist() == alone.tokens.tolist()
        assert found.parents.tolist() == alone.parents.tolist()
        assert (found.drawn_from is None) == (not drawn)
        if found.drawn_from is not None and alone.drawn_from is not None:
            assert found.drawn_from.shape == (len(found), VOCAB)
            assert torch.allclose(found.drawn_from, alone.drawn_from, atol=1e-5)


def test_a_right_tiny_saves_forwards_of_the_middle(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    middle = SelfSpeculative(target, HALF)
    staged = Staged(middle, DraftModel(middle.draft, middle.draft))
    reads = record_sizes(monkeypatch, middle, "read")
    state = staged.new_state(torch.tensor([5, 6, 7]))
    assert len(staged.propose(state, torch.tensor([6, 7, 8]), NOTHING, chain(9))) == 10
    # The prompt and the first token; that token and four guesses give five; the next and three guesses four more.
    assert reads == [4, 5, 4]
    reads.clear()
    assert len(staged.propose(state, torch.tensor([9]), NOTHING, chain(9))) == 10
    assert reads == [5, 4]  # tiny has taken back what the target refused, or its guesses would be of no use
    reads.clear()
    assert len(staged.propose(state, torch.tensor([9]), NOTHING, chain(1))) == 2
    assert reads == [1]


def test_tiny_guesses_only_what_is_of_use(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    middle = SelfSpeculative(target, HALF)
    tiny = DraftModel(middle.draft, middle.draft)  # right, four tokens at a time
    staged = Staged(middle, tiny)
    proposed = record_sizes(monkeypatch, tiny, "propose")
    state = staged.new_state(torch.tensor([5, 6, 7]))
    assert len(staged.propose(state, torch.tensor([6, 7, 8]), NOTHING, chain(6))) == 7
    assert proposed == [3], "five tokens come of its guesses; the middle adds the sixth itself"
    assert len(staged.propose(state, torch.tensor([9, 10]), NOTHING, chain(1))) == 2
    assert proposed == [3, 2], "it reads what was committed, even where no guess is of use"
    proposed.clear()
    assert len(staged.propose(state, torch.tensor([9]), NOTHING, chain(7))) == 8
    assert proposed == [1, 5]


def test_tiny_knows_the_text_and_no_guess_of_the_middle(target: Target) -> None:
    lookup = PromptLookup()
    staged = Staged(SelfSpeculative(target, HALF), lookup)
    text = torch.tensor(prompt_of(4) * 4)
    state, straight = staged.new_state(text[:1]), lookup.new_state(text[:1])
    for before, after in ((1, 5), (5, 6), (6, 16)):
        staged.propose(state, text[before:after], NOTHING, chain(5))
        lookup.propose(straight, text[before:after], NOTHING, chain(5))
        lookup.rewind(state.tiny, after)
        assert state.tiny == straight


def test_positions_of_the_middle(target: Target) -> None:
    middle = DraftModel(target, make_target("gpt2", seed=1))
    middle.draft.max_positions = 32
    for length in (26, 29, 31, 32, 40):
        staged = Staged(middle, PromptLookup())
        text = torch.tensor(prompt_of(4) * 10)[:length]
        state = staged.new_state(text[:-1])
        drafts = [staged.propose(state, fresh, NOTHING, chain(4)) for fresh in (text[1:], text[:1], text[:1])]
        assert [len(tree) - 1 for tree in drafts] == [max(0, min(4, 32 - length - i)) for i in range(3)]


def test_a_vocabulary_smaller_than_the_targets(target: Target) -> None:
    staged = Staged(DraftModel(target, make_llama(vocab_size=90)), PromptLookup())
    prompt = [95, 96, 5, 95, 96, 5, 95]  # the lookup drafts ids that the middle does not know
    plain = generate(target, prompt, max_new_tokens=16).tokens
    assert generate(target, prompt, staged, max_new_tokens=16).tokens == plain
    tree = staged.propose(
        staged.new_state(torch.tensor(prompt)),
        torch.tensor([*prompt[1:], 96]),
        NOTHING,
        chain(4),
        Drawing(1.0, SeededSource(0)),
    )
    assert tree.drawn_from is not None and tree.drawn_from.shape == (5, VOCAB)
    assert int(tree.tokens[1:].max()) < 90 and not tree.drawn_from[:, 90:].any()


def test_sampled_text_verified_by_rejection_is_written_to_its_end(target: Target) -> None:
    staged = Staged(SelfSpeculative(target, HALF), PromptLookup())
    speculation = Speculation(chain(4), draft_temperature=1.0)
    found = generate(target, prompt_of(), staged, speculation=speculation, max_new_tokens=20)
    assert len(found.tokens) == 20 or found.finish_reason == "eos"
    dynamic = generate(target, prompt_of(), staged, speculation=Speculation(Dynamic(8, 3, 2)), max_new_tokens=9)
    assert max(dynamic.stats.drafted) == 3
