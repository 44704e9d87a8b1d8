"""Targets whose rotary factors switch at a length: the text is the target's own on both sides and across."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from spechead.decoding.generate import Speculation, generate, generate_batch
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan, chain
from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged
from spechead.heads import HEADS
from spechead.target.model import Target
from tests.helpers.drafters import TREE, Scripted, prompt_of
from tests.helpers.targets import BORDER, LONGROPE, make_target

LENGTHS = (BORDER - 6, BORDER - 1, BORDER, BORDER + 1, BORDER + 5)
NEW = 14
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]


def by_transformers(target: Target, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    whole = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return whole[0, len(prompt) :].tolist()


def plain(target: Target) -> list[list[int]]:
    return [generate(target, prompt, max_new_tokens=NEW).tokens for prompt in PROMPTS]


@pytest.fixture(scope="module", params=LONGROPE)
def target(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param)


def test_plain_text_is_that_of_transformers(target: Target) -> None:
    before = [by_transformers(target, prompt) for prompt in PROMPTS]
    assert plain(target) == before
    assert [by_transformers(target, prompt) for prompt in PROMPTS] == before  # the model is left as it was
    assert target.outgrows(BORDER, BORDER + 1) == (target.config.model_type != "llama")


def test_a_batch_on_both_sides_is_what_its_texts_are_alone(target: Target) -> None:
    assert [row.tokens for row in generate_batch(target, PROMPTS, max_new_tokens=NEW)] == plain(target)


@pytest.mark.parametrize("plan", [chain(4), TREE], ids=str)
@pytest.mark.parametrize("right", [0, 2, 4])
def test_scripted_drafts_change_nothing(target: Target, plan: Plan, right: int) -> None:
    for prompt, text in zip(PROMPTS, plain(target), strict=True):
        result = generate(target, prompt, Scripted(text, right, plan), max_new_tokens=NEW)
        assert result.tokens == text
        if right == 4 and plan == chain(4):  # the border costs at most two passes
            assert result.stats.passes <= 5


def drafters(target: Target) -> dict[str, Drafter]:
    torch.manual_seed(4)
    heads: dict[str, Drafter] = {kind: HEADS[kind](HEADS[kind].Config(), target) for kind in HEADS}
    own = SelfSpeculative(target, (0, 1, 2, 3, 6))
    staged = Staged(DraftModel(target, target), PromptLookup(2))
    return heads | {"lookup": PromptLookup(2), "self": own, "same": DraftModel(target, target), "staged": staged}


def test_every_drafter_crosses_the_border(target: Target) -> None:
    texts, accepted = plain(target), Counter[str]()
    for name, drafter in drafters(target).items():
        plans: list[Plan] = [chain(3), TREE] if drafter.branches else [chain(3)]
        for plan in plans:
            rows = generate_batch(target, PROMPTS, drafter, speculation=Speculation(plan), max_new_tokens=NEW)
            assert [row.tokens for row in rows] == texts, (name, str(plan))
            accepted[name] += sum(sum(row.stats.accepted) for row in rows)
    assert accepted["same"] > 60, accepted


@pytest.mark.parametrize("plan", [chain(4), TREE], ids=str)
def test_a_draft_model_reads_again_what_its_target_does(plan: Plan) -> None:
    target = make_target("phi3-longrope")
    for drafter in (DraftModel(target, target), Staged(DraftModel(target, target), SelfSpeculative(target, (0, 1)))):
        for prompt in PROMPTS:
            chosen = Speculation(plan if drafter.branches else chain(4))
            stats = generate(target, prompt, drafter, speculation=chosen, max_new_tokens=NEW).stats
            assert stats.accepted == stats.drafted


def test_samples_are_those_of_plain_decoding(target: Target) -> None:
    for prompt in PROMPTS:
        text = generate(target, prompt, max_new_tokens=NEW, sampler=Sampler(0.8, seed=3)).tokens
        drafter = Scripted(text, 3, TREE)
        assert generate(target, prompt, drafter, max_new_tokens=NEW, sampler=Sampler(0.8, seed=3)).tokens == text
