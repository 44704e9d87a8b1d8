"""Draft models: in step with the target, with vocabularies and positions of another size."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from spechead.decoding.generate import Speculation, generate
from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import chain
from spechead.decoding.verify import rejection
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.errors import UserError
from spechead.target.model import Target
from tests.helpers.drafters import NOTHING, TREE, prompt_of, record_sizes
from tests.helpers.targets import BASE, FAMILIES, VOCAB, make_target, make_toy_tokenizer


def make_llama(**changes: Any) -> Target:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 3} | changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return Target(model, make_toy_tokenizer(), "draft")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_accepts_all_its_drafts(family: str) -> None:
    target = make_target(family)
    for plan in (chain(4), TREE):
        stats = generate(
            target, prompt_of(), DraftModel(target, target), speculation=Speculation(plan), max_new_tokens=20
        ).stats
        assert stats.accepted == stats.drafted
        assert set(stats.drafted[:-1]) == {plan.depth}


def test_one_forward_a_level(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DraftModel(target, make_llama())
    reads = record_sizes(monkeypatch, drafter, "read")
    state = drafter.new_state(torch.tensor([5, 6, 7]))
    drafter.propose(state, torch.tensor([6, 7, 8]), NOTHING, chain(4))
    assert reads == [4, 1, 1, 1]  # the prompt and the first token, then the chain
    reads.clear()
    drafter.propose(state, torch.tensor([9, 10]), NOTHING, TREE)
    assert reads == [2, 2, 3]  # two tokens committed; two nodes; one more node, with the two read again


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("plan", [chain(3), TREE], ids=str)
def test_sampled_drafts_come_with_their_distributions(target: Target, family: str, plan: Any) -> None:
    draft = make_target(family, seed=1)
    drafter = DraftModel(target, draft)
    text = torch.tensor(prompt_of(14))
    tree = drafter.propose(drafter.new_state(text[:-1]), text[1:], NOTHING, plan, Drawing(1.7, SeededSource(2)))
    assert tree.drawn_from is not None and tree.drawn_from.shape == (len(tree), VOCAB)
    for node in range(len(tree)):
        path = tree.tokens[tree.visible[node]][1:]
        q = (draft.logits(draft.forward(torch.cat([text, path])[None]).hidden[0, -1]) / 1.7).softmax(-1)
        expected = q if node in tree.parents else torch.zeros(VOCAB)
        assert torch.allclose(tree.drawn_from[node], expected, atol=1e-5)


def test_sampled_drafts_are_accepted_as_often_as_the_two_models_overlap(target: Target) -> None:
    drafter, random = SelfSpeculative(target, (0, 2, 3, 4, 5, 6)), SeededSource(0)
    text = torch.tensor(prompt_of(4))
    logits = [model.logits(model.forward(text[None]).hidden[0, -1]) for model in (target, drafter.draft)]
    p, q = ((model_logits / 2).softmax(-1) for model_logits in logits)
    overlap, trials = float(torch.minimum(p, q).sum()), 400
    assert 0.2 < overlap < 0.8
    accepted = 0
    for _ in range(trials):
        tree = drafter.propose(drafter.new_state(text), text[1:], NOTHING, chain(1), Drawing(2.0, random))
        accepted += len(rejection(tree, p.expand(2, -1), random).path) - 1
    assert abs(accepted / trials - overlap) < 3 * (overlap * (1 - overlap) / trials) ** 0.5


@pytest.mark.parametrize("size", [90, 128])
def test_vocabularies_padded_to_another_size(target: Target, size: int) -> None:
    drafter = DraftModel(target, make_llama(vocab_size=size))
    prompt = [95, 96, 5, 94]  # ids of the target that the smaller vocabulary does not have
    state, plain = drafter.new_state(torch.tensor(prompt)), generate(target, prompt, max_new_tokens=30).tokens
    assert generate(target, prompt, drafter, max_new_tokens=30).tokens == plain
    drafted: list[int] = []
    for fresh in ([96, 5, 94, 93], [7], [8], [9]):
        tree = drafter.propose(state, torch.tensor(fresh), NOTHING, chain(6), Drawing(2.0, SeededSource(1)))
        drafted += tree.tokens[1:].tolist()
        assert tree.drawn_from is not None and tree.drawn_from.shape == (7, VOCAB)
        assert torch.allclose(tree.drawn_from.sum(-1), torch.tensor([1.0] * 6 + [0.0]))
        assert not tree.drawn_from[:, size:].any()
    assert max(drafted) < min(size, VOCAB)


@pytest.mark.parametrize("length", [27, 28, 31, 32, 33, 60])
def test_nothing_is_drafted_beyond_the_draft_models_positions(target: Target, length: int) -> None:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    drafter = DraftModel(target, Target(AutoModelForCausalLM.from_config(config), make_toy_tokenizer(), "short"))
    text = torch.tensor(prompt_of(length))
    state = drafter.new_state(text[:-1])
    tree = drafter.propose(state, text[1:], NOTHING, chain(4))
    assert len(tree) - 1 == max(0, min(4, 32 - length))
    assert len(drafter.propose(state, torch.tensor([5]), NOTHING, chain(4))) - 1 == max(0, min(4, 31 - length))
    plain = generate(target, prompt_of(20), max_new_tokens=40)
    found = generate(target, prompt_of(20), drafter, max_new_tokens=40)
    assert found.tokens == plain.tokens and found.stats.drafted[-1] == 0


# ------------------------------------------------------------------------------------------------ tokenizers


def changed(edit: Any, added: list[str] | None = None) -> Target:
    """A draft model whose tokenizer's token -> id table went through `edit`."""
    toy = make_toy_tokenizer()
    content = json.loads(toy.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    edit(vocab)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in vocab]
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    fast.add_tokens(added or [])
    draft = copy.copy(make_llama())
    draft.tokenizer = fast
    return draft


def test_tokenizers_are_compared_by_content(target: Target) -> None:
    def swap(vocab: dict[str, int]) -> None:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    def rename(vocab: dict[str, int]) -> None:
        vocab["é"] = vocab.pop("a")

    def drop(vocab: dict[str, int]) -> None:
        del vocab["\n"]

    def extend(vocab: dict[str, int]) -> None:
        vocab["ab"] = 97

    DraftModel(target, changed(lambda vocab: None))
    DraftModel(target, changed(lambda vocab: None, added=["<tool>", "<image>"]))
    for edit, reason in (
        (swap, "'b' is 69 in one, 68 in the other|'a' is 68 in one, 69 in the other"),
        (rename, "'a' is 68 in one, no token in the other|'é' is no token in one, 68 in the other"),
        (drop, r"'\\n' is 96 in one, no token in the other"),
        (extend, "'ab' is no token in one, 97 in the other"),
    ):
        with pytest.raises(UserError, match=f"target 'tiny-llama' and draft model 'draft' have different.*({reason})"):
            DraftModel(target, changed(edit))
