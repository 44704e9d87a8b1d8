"""Several texts at once: each comes out as it would alone, whatever its neighbours do."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, RandomDrafter, Scripted, make_target
from torch import Tensor

from spechead.cache import KVCache
from spechead.generate import Generation, Speculation, generate, generate_batch
from spechead.sampling import RepetitionPenalty, Sampler
from spechead.target import Target, TargetOutput
from spechead.tree import Dynamic, Plan, Tree, chain

LENGTHS = (9, 1, 17)


def prompts_of(target: Target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, target.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


class Each:
    """One scripted drafter for each text, told apart by its prompt, right for a different number of drafts."""

    layers = ()
    tree: Plan = chain(4)

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self._scripts = {
            prompt: Scripted(text + [0] * 16, right) for right, (prompt, text) in enumerate(texts.items(), start=1)
        }

    def new_state(self, prompt: Tensor) -> tuple[Scripted, dict[str, int]]:
        script = self._scripts[tuple(prompt.tolist())]
        return script, script.new_state(prompt)

    def propose(
        self, state: tuple[Scripted, dict[str, int]], fresh: Tensor, out: TargetOutput, plan: Plan, drawing: None = None
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
def test_a_penalty_sees_each_nodes_own_prefix(family: str) -> None:
    """By hand, without a cache: the penalty on prompt and text so far, at every position."""
    target = make_target(family)
    prompt = prompts_of(target)[0]
    ids = list(prompt)
    for _ in range(24):
        logits = target.logits(target.forward(torch.tensor([ids])).hidden[0, -1:])
        ids.append(int(RepetitionPenalty(1.5)(torch.tensor([ids]), logits).argmax()))
    expected = ids[len(prompt) :]
    assert expected != generate(target, prompt, max_new_tokens=24).tokens

    def sampler() -> Sampler:
        return Sampler(repetition_penalty=1.5)

    assert generate(target, prompt, max_new_tokens=24, sampler=sampler()).tokens == expected
    for drafter in (Scripted(expected + [0] * 8, 3), RandomDrafter(7)):
        assert generate(target, prompt, drafter, max_new_tokens=24, sampler=sampler()).tokens == expected


def test_callbacks_say_which_row(target: Target) -> None:
    prompts = prompts_of(target)
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    rows = generate_batch(
        target, prompts, RandomDrafter(4), max_new_tokens=12, on_commit=lambda row, tokens, _: heard[row].extend(tokens)
    )
    assert [heard[number] for number in range(3)] == [row.tokens for row in rows]


def test_the_cache_holds_as_many_columns_as_the_longest_row(target: Target) -> None:
    """Rejected drafts and finished rows leave nothing behind: memory grows with the text alone."""
    cache = KVCache()
    prompts = prompts_of(target)
    ids = torch.zeros(3, 17, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    target.forward(ids, cache=cache)
    cache.settle(LENGTHS)
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


def test_speculation_is_checked() -> None:
    from spechead.errors import UserError

    assert Speculation(draft_temperature=1.0).rule == "rejection" and Speculation().rule == "own_draw"
    for bad, word in (
        ({"rule": "luck"}, "luck"),
        ({"rule": "block"}, "draft-temperature"),
        ({"draft_temperature": -1.0}, "negative"),
        ({"draft_temperature": 1.0, "tree": Dynamic(4, 2, 2)}, "dynamic"),
    ):
        with pytest.raises(UserError, match=word):
            Speculation(**bad)  # type: ignore[arg-type]


def test_memory_grows_with_the_text_and_not_with_the_passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred passes of eleven nodes each leave no more in the cache than a plain text of the same length."""
    held: list[KVCache] = []

    class Watched(KVCache):
        def __init__(self) -> None:
            super().__init__()
            held.append(self)

    monkeypatch.setattr("spechead.generate.KVCache", Watched)
    prompt = prompts_of(target)[0]
    for drafter in (None, RandomDrafter(3)):
        assert len(generate(target, prompt, drafter, max_new_tokens=120).tokens) == 120
    plain, drafted = held
    assert plain.length == drafted.length == 9 + 120 - 1  # the last token was never read
    storage = [sum(layer.rows.capacity for layer in cache.layers) for cache in held]
    assert storage[0] == storage[1]
