"""Parts of models, found in every family; tests of whole targets cover the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, WatermarkingConfig

from spechead.errors import UserError
from spechead.target.families import decoder_layers, eos_ids, ignored_generation, scaled_logits, with_module


def test_the_layers_are_the_list_of_that_length() -> None:
    decoder = nn.Sequential(nn.ModuleList([nn.Identity()]), nn.ModuleList([nn.Identity(), nn.Identity()]))
    assert decoder_layers(decoder, 2, "x") is decoder[1]
    with pytest.raises(UserError, match="target 'x': no list of 3 decoder layers in Sequential"):
        decoder_layers(decoder, 3, "x")


def test_logits_are_scaled_as_each_family_does() -> None:
    logits = torch.tensor([3.0, -6.0])
    assert torch.equal(scaled_logits(SimpleNamespace(), logits), logits)
    assert torch.equal(scaled_logits(SimpleNamespace(logit_scale=0.5), logits), logits * 0.5)
    assert torch.equal(scaled_logits(SimpleNamespace(logits_scaling=3.0), logits), logits / 3)
    capped = scaled_logits(SimpleNamespace(final_logit_softcapping=2.0), logits)
    assert torch.allclose(capped, 2 * torch.tanh(logits / 2))


def test_the_generation_config_has_the_ids_that_end_an_answer() -> None:
    config, tokenizer = SimpleNamespace(eos_token_id=2), SimpleNamespace(eos_token_id=9)
    generation = SimpleNamespace(eos_token_id=[4, 5])
    assert eos_ids(SimpleNamespace(generation_config=generation, config=config), tokenizer) == {4, 5, 9}
    assert eos_ids(SimpleNamespace(config=config), SimpleNamespace(eos_token_id=None)) == {2}


def test_settings_of_the_generation_config_that_differ_from_the_defaults_are_named() -> None:
    config = GenerationConfig(eos_token_id=2, bos_token_id=1, pad_token_id=0, num_beams=1, top_k=50)
    config.update(do_sample=False, output_attentions=False)  # as without them
    assert ignored_generation(SimpleNamespace(generation_config=config)) == {}
    config.update(temperature=0.6, max_length=99)
    assert ignored_generation(SimpleNamespace(generation_config=config)) == {"max_length": 99, "temperature": 0.6}
    assert ignored_generation(SimpleNamespace()) == {}
    marks = WatermarkingConfig(greenlist_ratio=0.3)
    odd = GenerationConfig()
    odd.update(watermarking_config=marks, temperature=float("nan"))
    assert ignored_generation(SimpleNamespace(generation_config=odd)) == {
        "temperature": "nan",
        "watermarking_config": marks.to_dict(),
    }


def test_a_copy_shares_all_but_one_module() -> None:
    inner, new = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Identity()
    module = nn.Sequential(inner, nn.Linear(2, 2))
    twin = with_module(module, inner[1], new)
    assert list(twin[0]) == [inner[0], new] and twin[1] is module[1]
    assert isinstance(inner[1], nn.ReLU) and module[0] is inner
