"""The decode loop: the text is the target's own whatever is drafted, and the counts are what scripts say."""

from __future__ import annotations

import pytest
import torch

from spechead.decoding import generate as generating
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.sampling import Sampler
from spechead.decoding.sequence import ActiveSequence
from spechead.decoding.tree import Dynamic, Static, chain
from spechead.drafters.base import Drafter
from spechead.errors import UserError
from spechead.target.cache import KVCache
from spechead.target.model import Target
from tests.helpers.clock import Clock
from tests.helpers.drafters import RandomDrafter, Scripted
from tests.helpers.targets import FAMILIES, make_target

TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def prompt_of(target: Target, length: int = 9, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()


def reference(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy text without any cache, by the model's own forward with eager attention."""
    ids = list(prompt)
    target.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            while len(ids) < len(prompt) + count:
                ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                if ids[-1] in target.eos_ids:
                    break
    finally:
        target.model.set_attn_implementation("spechead" if target._shared_attention else "eager")
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_targets_own_in_every_family(family: str) -> None:
    target = make_target(family)
    prompt = prompt_of(target)
    expected = reference(target, prompt, 30)
    plain = generate(target, prompt, max_new_tokens=30)
    assert plain.tokens == expected
    longer = expected + [5] * 8
    drafters: dict[str, Drafter] = {
        "perfect chain": Scripted(longer, 4),
        "perfect tree": Scripted(longer, 3, TREE),
        "half right tree": Scripted(longer, 1, TREE),
        "always wrong": Scripted(longer, 0, TREE),
        "random": RandomDrafter(3),
    }
    for name, drafter in drafters.items():
        assert generate(target, prompt, drafter, max_new_tokens=30).tokens == expected, name


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_packed_layers_write_the_same_text(family: str) -> None:
    prompt = prompt_of(make_target(family))
    expected = generate(make_target(family), prompt, max_new_tokens=24).tokens
    packed = make_target(family, pack=True)
    assert packed.packed
    assert generate(packed, prompt, max_new_tokens=24).tokens == expected
    assert generate(packed, prompt, RandomDrafter(1), max_new_tokens=24).tokens == expected


def test_node_logits_are_those_of_the_path_alone(target: Target) -> None:
    from spechead.decoding.tree import Tree

    prompt = torch.tensor([prompt_of(target)])
    tree = Tree(torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([-1, 0, 0, 1, 1, 3]))
    cache = KVCache()
    target.forward(prompt, cache=cache)
    nodes = target.forward(tree.tokens[None], cache=cache, positions=9 + tree.depths[None], visible=tree.visible[None])
    for node in range(len(tree)):
        path = [int(tree.tokens[i]) for i in range(len(tree)) if tree.visible[node, i]]
        alone = target.forward(torch.cat([prompt, torch.tensor([path])], 1))
        assert torch.allclose(nodes.hidden[0, node], alone.hidden[0, -1], atol=1e-5)


def test_scripted_drafts_give_exact_counts(target: Target) -> None:
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=40).tokens
    assert len(text) == 40
    result = generate(target, prompt, Scripted(text + [0] * 8, 2), max_new_tokens=37)
    stats = result.stats
    assert (stats.passes, stats.tokens) == (
        12,
        36,
    )  # 1 from the prefill, then 12 passes of 2 drafts and a bonus
    assert stats.committed == [3] * 12
    assert stats.accepted == [2] * 12
    assert stats.tokens / stats.passes == 3.0
    assert set(stats.drafted) == {4, 2}  # the last pass has room for two drafts and the bonus


def test_cap_inside_an_accepted_run_counts_only_what_is_kept(target: Target) -> None:
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=40).tokens
    for cap in range(1, 12):
        result = generate(target, prompt, Scripted(text, 4), max_new_tokens=cap)
        assert result.tokens == text[:cap]
        assert result.finish_reason == "length"
        assert result.stats.tokens == cap - 1 == sum(result.stats.committed)


def test_end_of_sequence_inside_an_accepted_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=40).tokens
    end = next(i for i in range(5, 40) if text[i] not in text[:i])
    monkeypatch.setattr(target, "eos_ids", frozenset({2, text[end]}))
    for drafter in (None, Scripted(text, 4), RandomDrafter(0)):
        result = generate(target, prompt, drafter, max_new_tokens=40)
        assert (result.tokens, result.finish_reason) == (text[: end + 1], "eos")


def test_stop_string_that_straddles_tokens(target: Target) -> None:
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=40).tokens
    stop = target.tokenizer.decode(text[10:13])
    plain = generate(target, prompt, max_new_tokens=40, stop=[stop])
    assert plain.finish_reason == "stop"
    assert target.tokenizer.decode(plain.tokens).endswith(stop)
    assert generate(target, prompt, Scripted(text, 4), max_new_tokens=40, stop=[stop]).tokens == plain.tokens


@pytest.mark.parametrize("temperature,top_k,top_p", [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8), (1.0, 8, 0.9)])
def test_sampled_text_is_plain_decodings_with_the_same_seed(
    target: Target, temperature: float, top_k: int, top_p: float
) -> None:
    prompt = prompt_of(target)

    def sampler() -> Sampler:
        return Sampler(temperature, top_k, top_p, seed=7)

    plain = generate(target, prompt, max_new_tokens=30, sampler=sampler()).tokens
    assert plain != generate(target, prompt, max_new_tokens=30, sampler=Sampler(temperature, seed=8)).tokens
    for drafter in (Scripted(plain, 4), Scripted(plain, 2, TREE), RandomDrafter(2)):
        assert generate(target, prompt, drafter, max_new_tokens=30, sampler=sampler()).tokens == plain


def test_the_last_position_is_reached_and_not_passed() -> None:
    for family in ("llama", "gpt2"):  # gpt2 has no position after the last one
        target = make_target(family)
        prompt = prompt_of(target, 240)
        plain = generate(target, prompt, max_new_tokens=100)
        assert len(plain.tokens) == 16 or plain.finish_reason == "eos"
        assert generate(target, prompt, Scripted(plain.tokens, 4), max_new_tokens=100).tokens == plain.tokens
        assert generate(target, prompt, RandomDrafter(1), max_new_tokens=100).tokens == plain.tokens


def test_streaming_calls_bring_every_token_once(target: Target) -> None:
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=30).tokens
    calls: list[tuple[list[int], int]] = []
    generate(target, prompt, Scripted(text, 2), max_new_tokens=30, on_commit=lambda t, n: calls.append((t, n)))
    assert [token for tokens, _ in calls for token in tokens] == text
    assert calls[0] == (text[:1], 0)
    assert calls[1] == (text[1:4], 2)


def test_prompts_of_one_token_and_bad_input(target: Target) -> None:
    plain = generate(target, [5], max_new_tokens=10).tokens
    assert generate(target, [5], RandomDrafter(4), max_new_tokens=10).tokens == plain
    assert generate(target, [5], Scripted(plain, 4), max_new_tokens=10).tokens == plain
    for prompt, cap in (([], 5), ([5], 0), ([5] * 256, 5)):
        with pytest.raises(UserError):
            generate(target, prompt, max_new_tokens=cap)


def test_gaps_belong_to_the_tokens(target: Target) -> None:
    prompt = prompt_of(target)
    plain = generate(target, prompt, max_new_tokens=20, keep_gaps=True)
    drafted = generate(target, prompt, Scripted(plain.tokens, 3), max_new_tokens=20, keep_gaps=True)
    assert len(plain.gaps) == 20 and min(plain.gaps) >= 0
    assert torch.allclose(torch.tensor(plain.gaps), torch.tensor(drafted.gaps), atol=1e-3)


def test_every_second_of_a_pass_belongs_to_a_phase(target: Target, clock: Clock) -> None:
    """A pass takes 10 s in the target, 100 s to draft, 1,000 s to draw, 10,000 s to keep, 100,000 s to commit."""
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=30).tokens
    drafter = Scripted(text, 4)
    clock.slow(target, "forward", 9.0)
    clock.slow(target, "logits", 1.0)
    clock.slow(drafter, "propose", 100.0)
    clock.slow(Sampler, "draw", 1_000.0)
    clock.slow(KVCache, "keep", 10_000.0)
    clock.slow(ActiveSequence, "commit", 100_000.0)
    clock.slow(generating._Batch, "_drop_finished", 500_000.0)
    clock.slow(generating, "ActiveSequence", 1_000_000.0)
    stats = generate(target, prompt, drafter, max_new_tokens=11).stats
    assert stats.passes == 2
    assert stats.seconds == {
        "prefill": 501_010.0,
        "draft": 200.0,
        "verify": 20.0,
        "accept": 2_000.0,
        "keep": 20_000.0,
        "commit": 1_200_000.0,
        "other": 1_000_000.0,
    }


def test_plans_are_asked_of_the_drafter(target: Target) -> None:
    prompt = prompt_of(target)
    text = generate(target, prompt, max_new_tokens=30).tokens
    result = generate(target, prompt, Scripted(text, 8), speculation=Speculation(chain(6)), max_new_tokens=29)
    assert max(result.stats.accepted) == 6
    assert str(Dynamic(30, 5, 4)) == "dynamic:nodes=30,depth=5,topk=4"
