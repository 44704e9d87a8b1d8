"""The whole matrix: every drafter, every family, chain and tree, one text and three, with and without a penalty."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, VOCAB, make_target

from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged
from spechead.generate import Generation, Speculation, generate, generate_batch
from spechead.heads import HEADS, Head
from spechead.sampling import Sampler
from spechead.target import Target
from spechead.tree import Static, chain

TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
CAP = 13  # falls inside an accepted run, and lies behind the window of 12 that some families have


def make_head(kind: str, target: Target) -> Head:
    torch.manual_seed(4)
    head = HEADS[kind](HEADS[kind].Config(draft_vocab_size=40), target)
    head.set_vocabulary(torch.arange(40) * 2)
    head.init_from_target()
    return head


def draft_model(target: Target, family: str) -> DraftModel:
    return DraftModel(target, make_target(family, seed=1))


DRAFTERS: dict[str, Callable[[Target, str], Drafter]] = {
    "prompt_lookup": lambda target, _: PromptLookup(2),
    "draft_model": draft_model,
    "the same model": lambda target, _: DraftModel(target, target),
    "self": lambda target, _: SelfSpeculative(target, (0, 1, 2, 3, 6)),
    "staged": lambda target, _: Staged(SelfSpeculative(target, (0, 1, 2, 3, 6)), PromptLookup(2)),
} | {kind: lambda target, _, kind=kind: make_head(kind, target) for kind in HEADS}  # type: ignore[misc]


def texts(rows: list[Generation]) -> list[tuple[list[int], str]]:
    return [(row.tokens, row.finish_reason) for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_writes_the_targets_text(family: str) -> None:
    target = make_target(family)
    generator = torch.Generator().manual_seed(2)
    once = torch.randint(3, VOCAB, (7,), generator=generator).tolist()
    prompts = [[5], once, once + once + once[:2]]
    first = generate(target, once, max_new_tokens=CAP)
    target.eos_ids = target.eos_ids | {first.tokens[8]}  # one text ends early, and drafts hold its end
    for penalty, plan in ((1.0, TREE), (1.2, chain(4)), (1.2, TREE)):
        samplers = [Sampler(repetition_penalty=penalty) for _ in prompts]
        plain = texts(
            [
                generate(target, prompt, max_new_tokens=CAP, sampler=sampler)
                for prompt, sampler in zip(prompts, samplers, strict=True)
            ]
        )
        for name, make in DRAFTERS.items():
            drafter, speculation = make(target, family), Speculation(plan)
            rows = generate_batch(
                target, prompts, drafter, speculation=speculation, max_new_tokens=CAP, samplers=samplers
            )
            assert texts(rows) == plain, (name, penalty, str(plan), "three texts")
            alone = generate(
                target, prompts[2], drafter, speculation=speculation, max_new_tokens=CAP, sampler=samplers[2]
            )
            assert texts([alone]) == plain[2:], (name, penalty, str(plan), "one text")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_last_position_is_reached(name: str) -> None:
    target = make_target("llama")
    prompt = torch.randint(3, VOCAB, (244,), generator=torch.Generator().manual_seed(5)).tolist()
    plain = generate(target, prompt, max_new_tokens=99)
    assert len(plain.tokens) == 12 and plain.finish_reason == "length"
    for plan in (chain(4), TREE):
        drafter = DRAFTERS[name](target, "llama")
        assert texts([generate(target, prompt, drafter, speculation=Speculation(plan), max_new_tokens=99)]) == texts(
            [plain]
        )
