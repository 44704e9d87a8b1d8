"""The target drafts with some of its own layers, which share its weights."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from spechead.decoding.generate import generate
from spechead.decoding.tree import Tree
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.errors import UserError
from spechead.target.cache import KVCache
from spechead.target.model import Target
from tests.helpers.drafters import HALF, prompt_of
from tests.helpers.targets import FAMILIES, make_target, make_toy_tokenizer


def handmade(target: Target, layers: tuple[int, ...]) -> Target:
    """A model of its own with copies of those layers' weights."""
    config = copy.deepcopy(target.config)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    model = AutoModelForCausalLM.from_config(config)
    prefix = next(name for name, module in target.model.named_modules() if module is target._blocks) + "."
    weights = {}
    for name, weight in target.model.state_dict().items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            weights[name] = weight
        elif int(number) in layers:
            weights[f"{prefix}{layers.index(int(number))}.{rest}"] = weight
    model.load_state_dict(weights)
    return Target(model, make_toy_tokenizer(), "handmade")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_subset_is_the_model_of_those_layers_and_shares_its_weights(family: str) -> None:
    target = make_target(family)
    ids = torch.tensor([prompt_of(20)])
    whole = target.forward(ids).hidden
    for layers in (HALF, (2, 4, 5, 6)):
        subset, other = target.subset(layers), handmade(target, layers)
        assert subset.n_layers == 4 and len(subset.model.state_dict()) == len(other.model.state_dict())
        owned = {parameter.data_ptr() for parameter in target.model.parameters()}
        assert {parameter.data_ptr() for parameter in subset.model.parameters()} <= owned
        expected = other.forward(ids, taps=(0, 1, 4))
        found = subset.forward(ids, taps=(0, 1, 4))
        assert torch.equal(found.hidden, expected.hidden) and torch.equal(found.features, expected.features)
        assert torch.equal(subset.logits(found.hidden), other.logits(expected.hidden))
        tree, cache = Tree(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, 0, 0, 2])), KVCache()
        subset.forward(ids, cache=cache)
        at, visible = 20 + tree.depths[None], tree.visible[None]
        nodes = subset.forward(tree.tokens[None], cache=cache, positions=at, visible=visible).hidden
        cache.keep([[0, 2]], 20)
        after = subset.forward(torch.tensor([[9]]), cache=cache).hidden
        text = torch.cat([ids, torch.tensor([[5, 7, 9]])], 1)
        alone = other.forward(text).hidden
        assert torch.allclose(nodes[:, [0, 2]], alone[:, 20:22], atol=1e-4)
        assert torch.allclose(after, alone[:, 22:], atol=1e-4)
    assert target.n_layers == 7 and torch.equal(target.forward(ids).hidden, whole)


def test_layers_of_a_packed_target(target: Target) -> None:
    packed = make_target(pack=True)
    prompt = prompt_of()
    expected = generate(target.subset(HALF), prompt, max_new_tokens=12).tokens
    assert generate(packed.subset(HALF), prompt, max_new_tokens=12).tokens == expected
    plain = generate(target, prompt, max_new_tokens=12).tokens
    assert generate(packed, prompt, SelfSpeculative(packed, HALF), max_new_tokens=12).tokens == plain


@pytest.mark.parametrize("layers", [[], [7], [-1, 2], [3, 1], [2, 2]])
def test_layers_that_a_target_does_not_have(target: Target, layers: list[int]) -> None:
    with pytest.raises(UserError, match="ascending numbers from 0 to 6"):
        target.subset(layers)
