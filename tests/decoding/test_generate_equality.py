"""The whole matrix: every drafter, every family, chain and tree, one text and three, with and without a penalty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from spechead.data.dataset import Sample, collate
from spechead.decoding.generate import Generation, Speculation, generate, generate_batch
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan, Static, chain
from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged
from spechead.heads import HEADS, Head
from spechead.heads.unrolled import UnrolledHead
from spechead.target.model import Target
from tests.helpers.heads import learn
from tests.helpers.targets import FAMILIES, VOCAB, make_target

TREE, CHAIN = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))), chain(3)
CAP = 10  # tokens: two of the texts leave the window of 12 that some families have, and plans outgrow the last room
# Penalty, plan, and how many of the three texts: any two of these meet.
RUNS: list[tuple[float, Plan, int]] = [(1.0, TREE, 3), (1.0, CHAIN, 1), (1.2, CHAIN, 3), (1.2, TREE, 1)]


def make_head(kind: str, target: Target) -> Head:
    torch.manual_seed(4)
    short = {"steps": 2} if issubclass(HEADS[kind], UnrolledHead) else {}  # enough to learn a few tokens by heart
    head = HEADS[kind](HEADS[kind].Config(draft_vocab_size=40, **short), target)
    head.set_vocabulary(torch.arange(40) * 2)
    return head


def draft_model(target: Target, family: str) -> DraftModel:
    """A model that is a little off the target, and so often right."""
    draft = make_target(family)
    for parameter in draft.model.parameters():
        parameter.add_(0.03 * torch.randn_like(parameter))
    return DraftModel(target, draft)


DRAFTERS: dict[str, Callable[[Target, str], Drafter]] = {
    "prompt_lookup": lambda target, _: PromptLookup(2),
    "draft_model": draft_model,
    "the same model": lambda target, _: DraftModel(target, target),
    "self": lambda target, _: SelfSpeculative(target, (0, 1, 2, 3, 6)),
    "staged": lambda target, family: Staged(draft_model(target, family), PromptLookup(2)),
} | {kind: lambda target, _, kind=kind: make_head(kind, target) for kind in HEADS}  # type: ignore[misc]


def texts(rows: list[Generation]) -> list[tuple[list[int], str]]:
    return [(row.tokens, row.finish_reason) for row in rows]


def teach(head: Head, prompt: list[int], text: list[int]) -> None:
    """Have the head know the text by heart, or nearly so."""
    others = [token for token in range(0, VOCAB, 2) if token not in text]
    head.set_vocabulary(torch.tensor(sorted([*set(text), *others][: head.draft_size])))
    supervised = torch.arange(len(prompt) + len(text)) >= len(prompt)
    learn(head, collate([Sample(torch.tensor(prompt + text), supervised, 0)], 64), 12)


def end_inside(text: list[int]) -> int:
    """A token that, where all drafts are right, is one of them and has others after it in its pass.

    The passes bring the places 1-4 and 5-8, of which 4 and 8 are the bonus.
    """
    return next(text[place] for place in (6, 5, 2, 1) if text[place] not in text[:place])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_writes_the_targets_text(family: str) -> None:
    target = make_target(family)
    once = torch.randint(3, VOCAB, (7,), generator=torch.Generator().manual_seed(11)).tolist()
    prompts = [once + once + once[:2], [5], once]
    text = generate(target, prompts[0], max_new_tokens=CAP).tokens
    target.eos_ids = target.eos_ids | {end_inside(text)}
    drafters = {name: make(target, family) for name, make in DRAFTERS.items()}
    for drafter in drafters.values():
        if isinstance(drafter, Head):
            teach(drafter, prompts[0], text)
    plain = {
        penalty: [
            generate(target, prompt, max_new_tokens=CAP, sampler=Sampler(repetition_penalty=penalty))
            for prompt in prompts
        ]
        for penalty in (1.0, 1.2)
    }
    assert plain[1.0][0].finish_reason == "eos" and texts(plain[1.2]) != texts(plain[1.0])
    kept = Counter[str]()
    for penalty, plan, count in RUNS:
        for name, drafter in drafters.items():
            rows = generate_batch(
                target,
                prompts[:count],
                drafter,
                speculation=Speculation(plan),
                max_new_tokens=CAP,
                samplers=[Sampler(repetition_penalty=penalty) for _ in range(count)],
            )
            assert texts(rows) == texts(plain[penalty][:count]), (name, penalty, str(plan), count)
            kept[name] += sum(sum(row.stats.accepted) for row in rows)
            if name == "the same model" and penalty == 1.0:  # more drafts followed the end, and they were right
                assert rows[0].stats.committed[-1] < rows[0].stats.accepted[-1]
    assert all(kept[name] for name in drafters if name != "prompt_lookup"), kept


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
