"""Several texts at once: each comes out as it would alone. And what texts leave in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from spechead.decoding.generate import Generation, Speculation, generate, generate_batch
from spechead.decoding.sampling import Drawing, Sampler
from spechead.decoding.tree import Dynamic, Plan, Static, Tree, chain
from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.errors import UserError
from spechead.heads import HEADS, Head
from spechead.target.cache import KVBuffer, KVCache
from spechead.target.model import Target, TargetOutput
from tests.helpers.drafters import RandomDrafter, Scripted
from tests.helpers.heads import LENGTHS, OPTIONS, by_hand, overfitted, prompts_of
from tests.helpers.targets import FAMILIES, VOCAB, make_target

TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


class Each:
    """One scripted drafter for each prompt, right for a different number of drafts."""

    taps: Sequence[int] = ()
    branches = True
    tree: Plan = chain(4)

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self._scripts = {
            prompt: Scripted(text + [0] * 16, right) for right, (prompt, text) in enumerate(texts.items(), start=1)
        }

    def new_state(self, prompt: Tensor) -> tuple[Scripted, dict[str, int]]:
        script = self._scripts[tuple(prompt.tolist())]
        return script, script.new_state(prompt)

    def propose(
        self,
        state: tuple[Scripted, dict[str, int]],
        fresh: Tensor,
        out: TargetOutput,
        plan: Plan,
        drawing: Drawing | None = None,
    ) -> Tree:
        script, seen = state
        return script.propose(seen, fresh, out, plan)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_single_texts_in_every_family(family: str) -> None:
    target = make_target(family)
    prompts = prompts_of(target)
    alone = [generate(target, prompt, max_new_tokens=24).tokens for prompt in prompts]
    texts = {tuple(prompt): text for prompt, text in zip(prompts, alone, strict=True)}
    for drafter in (None, Each(texts), RandomDrafter(5)):
        together = generate_batch(target, prompts, drafter, max_new_tokens=24)
        assert [row.tokens for row in together] == alone, drafter


def test_rows_end_at_different_times(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(target)
    texts = [generate(target, prompt, max_new_tokens=40).tokens for prompt in prompts]
    ends = {text[i] for i, text in zip((4, 11, 25), texts, strict=True)}
    monkeypatch.setattr(target, "eos_ids", frozenset(ends))

    def shape(rows: list[Generation]) -> list[tuple[list[int], str]]:
        return [(row.tokens, row.finish_reason) for row in rows]

    alone = shape([generate(target, prompt, max_new_tokens=30) for prompt in prompts])
    assert len({len(tokens) for tokens, _ in alone}) == 3
    assert shape(generate_batch(target, prompts, max_new_tokens=30)) == alone
    assert shape(generate_batch(target, prompts, RandomDrafter(2), max_new_tokens=30)) == alone
    by_prompt = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    drafted = generate_batch(target, prompts, Each(by_prompt), max_new_tokens=30)
    assert shape(drafted) == alone
    first = drafted[0].stats
    assert first.tokens == len(alone[0][0]) - 1 == sum(first.committed) and first.passes == len(first.committed)


def test_each_row_samples_with_its_own_seed_and_penalty(target: Target) -> None:
    prompts = prompts_of(target)

    def samplers() -> list[Sampler]:
        return [Sampler(1.0, seed=1), Sampler(0.0, repetition_penalty=1.3), Sampler(0.8, 20, 0.9, seed=4, min_p=0.02)]

    alone = [
        generate(target, prompt, max_new_tokens=20, sampler=sampler).tokens
        for prompt, sampler in zip(prompts, samplers(), strict=True)
    ]
    for drafter in (None, RandomDrafter(1)):
        rows = generate_batch(target, prompts, drafter, max_new_tokens=20, samplers=samplers())
        assert [row.tokens for row in rows] == alone


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(repetition_penalty=1.5),
        Sampler(processors=[NoRepeatNGramLogitsProcessor(1)]),
        Sampler(repetition_penalty=1.2, processors=[NoRepeatNGramLogitsProcessor(2)]),
    ],
    ids=["penalty", "no token twice", "penalty, no bigram twice"],
)
def test_processors_see_each_nodes_own_prefix(family: str, sampler: Sampler) -> None:
    target = make_target(family)
    prompt = prompts_of(target)[0]
    expected = by_hand(target, prompt, sampler, 24)
    assert expected != generate(target, prompt, max_new_tokens=24).tokens
    for drafter in (None, Scripted(expected + [0] * 8, 3), Scripted(expected + [0] * 8, 3, TREE), RandomDrafter(7)):
        assert generate(target, prompt, drafter, max_new_tokens=24, sampler=sampler).tokens == expected


def test_callbacks_say_which_row(target: Target) -> None:
    prompts = prompts_of(target)
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    rows = generate_batch(
        target, prompts, RandomDrafter(4), max_new_tokens=12, on_commit=lambda row, tokens, _: heard[row].extend(tokens)
    )
    assert [heard[number] for number in range(3)] == [row.tokens for row in rows]


def test_the_cache_holds_as_many_columns_as_the_longest_row(target: Target) -> None:
    """Rejected drafts and finished rows leave nothing in memory: it grows with the text alone."""
    cache = KVCache()
    prompts = prompts_of(target)
    ids = torch.zeros(3, 17, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    target.forward(ids, cache=cache)
    cache.set_lengths(LENGTHS)
    assert (cache.length, cache.lengths) == (17, [9, 1, 17])
    visible = torch.eye(4, dtype=torch.bool).expand(3, 4, 4)
    positions = torch.tensor([[9], [1], [17]]).expand(3, 4)
    target.forward(torch.full((3, 4), 5), cache=cache, positions=positions, visible=visible)
    cache.keep([[0, 2], [0], [0, 1, 3]], 17)
    assert (cache.length, cache.lengths) == (20, [11, 2, 20])
    cache.select(torch.tensor([0, 1]))
    assert (cache.length, cache.lengths) == (11, [11, 2])
    cache.select(torch.tensor([1]))
    assert (cache.length, cache.lengths) == (2, None)


# ------------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_in_a_batch_as_they_do_alone(kind: str) -> None:
    """Else the text would still be right, and only slower: that drafts are right in each row is what shows it."""
    target, head, prompts = overfitted(kind)
    for plan in (chain(4), chain(4, floor=0.5), TREE, Dynamic(nodes=9, depth=4, topk=3)):
        speculation = Speculation(plan)
        rows = generate_batch(target, prompts, head, speculation=speculation, max_new_tokens=22)
        for prompt, row in zip(prompts, rows, strict=True):
            alone = generate(target, prompt, head, speculation=speculation, max_new_tokens=22)
            assert row.tokens == alone.tokens
            assert row.stats.drafted == alone.stats.drafted, str(plan)
            assert row.stats.accepted == alone.stats.accepted, str(plan)
            assert sum(row.stats.accepted) > 3, str(plan)


# ------------------------------------------------------------------------------------------------ memory


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[KVBuffer]:
    """All buffers of keys and values that are made, the target's and the drafters'; they begin small."""
    made: list[KVBuffer] = []
    real = KVBuffer.__init__

    def remember(self: KVBuffer) -> None:
        real(self)
        made.append(self)

    monkeypatch.setattr(KVBuffer, "__init__", remember)
    monkeypatch.setattr("spechead.target.cache._FIRST_CAPACITY", 4)
    return made


def wrong_head(kind: str, target: Target, text: list[int]) -> Head:
    """A head that knows no token of the text."""
    others = sorted(set(range(VOCAB)) - set(text))
    head = HEADS[kind](HEADS[kind].Config(**OPTIONS.get(kind, {}) | {"draft_vocab_size": len(others)}), target)
    head.set_vocabulary(torch.tensor(others))
    return head


WRONG: dict[str, Callable[[Target, list[int]], Drafter | None]] = {
    "none": lambda target, text: None,
    "scripted": lambda target, text: Scripted(text, 0, TREE),
    "draft_model": lambda target, text: DraftModel(target, make_target(seed=1)),
} | {kind: lambda target, text, kind=kind: wrong_head(kind, target, text) for kind in HEADS}  # type: ignore[misc]


@pytest.mark.parametrize("name", WRONG)
def test_memory_grows_with_the_text_and_not_with_the_passes(target: Target, stores: list[KVBuffer], name: str) -> None:
    """Drafts that are rejected, seven at each pass, take no memory, in the target's cache or the drafter's."""
    prompt, made = prompts_of(target)[0], []
    drafter = WRONG[name](target, generate(target, prompt, max_new_tokens=60).tokens)
    for length in (30, 60):
        stores.clear()
        found = generate(target, prompt, drafter, speculation=Speculation(TREE), max_new_tokens=length)
        assert len(found.tokens) == length
        assert found.stats.passes > 0.8 * length if name == "draft_model" else not any(found.stats.accepted)
        longest = len(prompt) + length + len(TREE.choices)
        assert all(0 < store.capacity <= 1.5 * longest for store in stores)
        made.append(len(stores))
    assert made[0] == made[1] >= target.n_layers


@pytest.mark.parametrize("name", ["none", "scripted", "eagle3", "hydra"])
def test_no_tensor_outlives_its_pass(target: Target, name: str) -> None:
    prompt, commits, tensors = prompts_of(target)[0], 0, list[int]()

    def count(_: list[int], __: int) -> None:
        nonlocal commits
        commits += 1
        if commits in (10, 35):
            gc.collect()
            tensors.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    drafter = WRONG[name](target, generate(target, prompt, max_new_tokens=40).tokens)
    generate(target, prompt, drafter, speculation=Speculation(TREE), max_new_tokens=40, on_commit=count)
    assert len(tensors) == 2 and tensors[0] == tensors[1]


def test_memory_of_a_lookup_grows_with_the_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, prompt = PromptLookup(3), prompts_of(target)[0]
    state = drafter.new_state(torch.tensor(prompt))
    monkeypatch.setattr(drafter, "new_state", lambda prompt: state)
    generate(target, prompt, drafter, max_new_tokens=100)
    assert len(prompt) + 90 < len(state.tokens) < len(prompt) + 100
    assert sum(map(len, state.following.values())) < 3 * len(state.tokens)


def test_noise_is_kept_for_the_places_of_one_pass(target: Target) -> None:
    sampler, kept = Sampler(1.0, seed=3), list[int]()
    drafter = Scripted([0] * 100, 0, TREE)
    generate(
        target,
        [5],
        drafter,
        sampler=sampler,
        max_new_tokens=60,
        on_commit=lambda *_: kept.append(len(sampler._noise)),
    )
    assert len(kept) > 40 and max(kept) == TREE.depth + 1


def test_a_text_that_has_ended_leaves_the_memory_of_its_drafter(target: Target) -> None:
    class State:
        pass

    class Remembered(RandomDrafter):
        def new_state(self, prompt: Tensor) -> State:  # type: ignore[override]
            states.append(weakref.ref(state := State()))
            return state

    states: list[weakref.ref[State]] = []
    alive: list[int] = []
    prompts = [[5] * 250, [5], [6]]  # the first soon has no position left
    rows = generate_batch(
        target,
        prompts,
        Remembered(1),
        max_new_tokens=30,
        on_commit=lambda *_: alive.append(sum(state() is not None for state in states)),
    )
    assert [len(row.tokens) for row in rows] == [6, 30, 30]
    assert max(alive) == 3 and alive[-1] < 3


def test_a_batch_without_prompts_is_named(target: Target) -> None:
    with pytest.raises(UserError, match="no prompts; decoding needs at least one"):
        generate_batch(target, [])
