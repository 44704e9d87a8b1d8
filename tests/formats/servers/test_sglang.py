"""SGLang: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.formats.servers.expected import DRAFT, EAGLE3, LAYER, NO_NORMS, H, export, has, shapes
from tests.helpers.exporting import make_head, tiny


def test_sglang_eagle3_leaves_the_usual_layers_out(tmp_path: Path) -> None:
    config, tensors, _ = export("sglang", "eagle3", tmp_path)
    assert shapes(tensors) == EAGLE3
    assert has(config, LAYER | NO_NORMS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT})
    assert "eagle_config" not in config and "eagle_aux_hidden_state_layer_ids" not in config


def test_sglang_counts_the_layers_whose_outputs_it_reads(tmp_path: Path) -> None:
    config, _, _ = export("sglang", "eagle3-other-taps", tmp_path)  # hidden_states 1, 3, 6
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    assert config["eagle_config"] == ids


def test_sglang_has_another_name_for_the_norms_of_later_layers(tmp_path: Path) -> None:
    _, tensors, _ = export("sglang", "eagle3-layers", tmp_path)
    head = make_head("eagle3-layers", tiny("llama")).state_dict()
    for i in (1, 2):
        assert f"layers.{i}.input_layernorm.weight" not in tensors
        assert torch.equal(tensors[f"layers.{i}.hidden_norm.weight"], head[f"layers.{i}.input_layernorm.weight"])
    assert torch.equal(tensors["midlayer.hidden_norm.weight"], head["midlayer.hidden_norm.weight"])


def test_sglang_eagle_has_a_bias_in_its_fusion(tmp_path: Path) -> None:
    config, tensors, _ = export("sglang", "eagle-layers", tmp_path)
    assert has(config, {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": True})
    zeros = ["fc.bias", "layers.0.self_attn.o_proj.bias", "layers.1.self_attn.o_proj.bias"]
    assert all(tensors[name].shape == (H,) and not tensors[name].any() for name in zeros)
