"""Targets: fingerprints, tapped layers, names that cannot be loaded, families that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from spechead.errors import UserError
from spechead.target.model import Target
from spechead.target.packed_linear import PackedLinear
from tests.helpers.targets import BASE, FAMILIES, make_target, make_toy_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    target = make_target()
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


def test_fingerprint_is_the_same_in_every_dtype_and_differs_for_other_weights(folder: Path) -> None:
    loaded = {dtype: Target.load(str(folder), dtype=dtype) for dtype in ("float32", "bfloat16", "float16")}
    assert len({target.fingerprint for target in loaded.values()}) == 1
    assert [target.dtype for target in loaded.values()] == [torch.float32, torch.bfloat16, torch.float16]
    assert make_target(seed=1).fingerprint != make_target(seed=0).fingerprint == loaded["float32"].fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_tapped_layers_are_the_models_hidden_states(family: str) -> None:
    target = make_target(family)
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    target.model.set_attn_implementation("eager")
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
        whole = target.model(ids).logits
    target.model.set_attn_implementation("spechead" if target._shared_attention else "eager")
    out = target.forward(ids, taps=(0, 2, 3, 7))
    assert torch.allclose(out.features, torch.cat([states[i] for i in (0, 2, 3, 7)], -1), atol=1e-4)
    assert torch.allclose(target.logits(out.hidden), whole, atol=1e-3)
    rows = torch.tensor([3, 5, 90])
    assert torch.allclose(target.logits(out.hidden, rows), whole[..., rows], atol=1e-3)


@pytest.mark.parametrize("pack", [False, True])
def test_the_output_layer_that_drafts_read_is_kept_for_its_rows_and_dtype(pack: bool) -> None:
    torch.manual_seed(0)
    config = transformers.PhiConfig(  # its output layer has a bias
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    target = Target(AutoModelForCausalLM.from_config(config), make_toy_tokenizer(), "tiny-phi")
    torch.nn.init.normal_(target._output.bias)
    weight, bias = target._output.weight.clone(), target._output.bias.clone()
    if pack:
        target.pack()
    rows, hidden = torch.tensor([3, 5, 90]), torch.randn(4, 32)
    whole = target.output_layer(None, torch.float32)
    assert torch.allclose(whole(hidden), hidden @ weight.T + bias, atol=1e-5)
    some = target.output_layer(rows, torch.float32)
    assert torch.allclose(some(hidden), hidden @ weight[rows].T + bias[rows], atol=1e-5)
    assert target.output_layer(rows, torch.float32) is some
    coarse = target.output_layer(rows, torch.bfloat16)
    assert torch.allclose(coarse(hidden.bfloat16()).float(), some(hidden), atol=0.05)
    assert target.output_layer(torch.tensor([7, 8]), torch.bfloat16)(hidden.bfloat16()).shape == (4, 2)
    assert isinstance(some, PackedLinear) is isinstance(coarse, PackedLinear) is pack


def test_the_heads_embedding_is_the_targets(target: Target) -> None:
    gemma = make_target("gemma3")
    ids = torch.tensor([4, 5])
    assert torch.equal(gemma.embed(ids), gemma.model.get_input_embeddings()(ids))
    assert not torch.equal(gemma.embed(ids), gemma.model.get_input_embeddings().weight[ids])  # it scales


def test_no_graph_is_built(target: Target) -> None:
    out = target.forward(torch.tensor([[4, 5]]), taps=(1,))
    assert not out.hidden.requires_grad and not out.features.requires_grad
    assert not any(p.requires_grad for p in target.model.parameters())


def test_targets_that_take_no_positions_are_refused() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4)  # ALiBi: counts the keys
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="bloom"):
        Target(model, make_toy_tokenizer(), "tiny")


def test_layers_that_cannot_be_verified_in_a_tree_are_refused() -> None:
    config = transformers.LlamaConfig(**BASE)
    model = AutoModelForCausalLM.from_config(config)
    config.layer_types = ["chunked_attention"] * 7
    with pytest.raises(UserError, match="chunked_attention"):
        Target(model, make_toy_tokenizer(), "tiny")
