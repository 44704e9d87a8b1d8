"""vLLM: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from tests.formats.servers.expected import DRAFT, EAGLE3, LAYER, NO_NORMS, TOKENS, H, export, has, shapes
from tests.helpers.exporting import tiny


def test_vllm_eagle3(tmp_path: Path) -> None:
    config, tensors, out = export("vllm", "eagle3", tmp_path)
    assert shapes(tensors) == EAGLE3
    assert has(config, LAYER | NO_NORMS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT})
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert "num_aux_hidden_states" not in config
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["d2t"].tolist() == [i + 1 for i in range(DRAFT)]  # draft id i is target id 2i + 1
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "spechead.json",
    ]
    assert (out / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_vllm_sizes_the_fusion_of_other_taps(tmp_path: Path) -> None:
    config, tensors, _ = export("vllm", "eagle3-two-taps", tmp_path)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["num_aux_hidden_states"] == 2
    assert tensors["fc.weight"].shape == (H, 2 * H)


def test_vllm_eagle3_of_3_1(tmp_path: Path) -> None:
    config, tensors, _ = export("vllm", "eagle3-1", tmp_path)
    assert has(config, NO_NORMS | {"fc_norm": True, "norm_output": True})
    assert {name for name in tensors if name.startswith("fc_norm")} == {f"fc_norm.{i}.weight" for i in range(3)}


def test_vllm_eagle3_with_a_fusion_norm_or_layers(tmp_path: Path) -> None:
    config, tensors, _ = export("vllm", "eagle3-fusion", tmp_path / "a")
    assert config["norm_before_fc"] is True and tensors["input_norm.weight"].shape == (3 * H,)
    config, tensors, _ = export("vllm", "eagle3-layers", tmp_path / "b")
    assert config["num_hidden_layers"] == 3
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (H, H)
    assert {"layers.1.input_layernorm.weight", "layers.2.input_layernorm.weight"} <= tensors.keys()


def test_vllm_scaled_positions(tmp_path: Path) -> None:
    config, _, _ = export("vllm", "eagle3-scaled", tmp_path)
    assert config["rope_theta"] == 5e3
    assert config["rope_scaling"]["rope_type"] == "llama3" and config["rope_scaling"]["factor"] == 8.0
    assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 5e3}


def test_vllm_eagle(tmp_path: Path) -> None:
    config, tensors, _ = export("vllm", "eagle-layers", tmp_path)
    assert has(config, LAYER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "qkv_bias": True})
    layer = [f"self_attn.{part}_proj.{what}" for part in "qkv" for what in ("weight", "bias")]
    layer += ["self_attn.o_proj.weight", "post_attention_layernorm.weight"]
    layer += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names = {"fc.weight", "layers.1.input_layernorm.weight"} | {f"layers.{i}.{name}" for i in (0, 1) for name in layer}
    assert tensors.keys() == names
    assert tensors["fc.weight"].shape == (H, 2 * H)


def test_vllm_gets_the_embedding_that_the_target_scales(tmp_path: Path) -> None:
    _, tensors, _ = export("vllm", "eagle", tmp_path, "gemma3")
    stored = tiny("gemma3").model.get_input_embeddings().weight
    assert torch.allclose(tensors["embed_tokens.weight"], stored * H**0.5)


def test_vllm_medusa(tmp_path: Path) -> None:
    config, tensors, _ = export("vllm", "medusa-blocks", tmp_path)
    wanted = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 2, "num_hidden_layers": 2}
    wanted |= {"medusa_fc_bias": True, "original_lm_head": False, "truncated_vocab_size": None}
    assert has(config, wanted | {"hidden_size": H, "vocab_size": TOKENS})
    blocks = {f"blocks.{k}.layers.{i}.{what}" for k in (0, 1) for i in (0, 1) for what in ("weight", "bias")}
    assert tensors.keys() == blocks | {"lm_heads.0.weight", "lm_heads.1.weight"}
    assert tensors["lm_heads.0.weight"].shape == (TOKENS, H)


def test_vllm_medusa_shared(tmp_path: Path) -> None:
    config, tensors, _ = export("vllm", "medusa-shared", tmp_path)
    assert has(config, {"original_lm_head": True, "truncated_vocab_size": None})
    assert torch.equal(tensors["lm_head.weight"], tiny("llama").output_rows(None)[0])


def test_a_vocabulary_that_vllm_would_stop_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draft_vocab_size: 30 .*token_map"):
        export("vllm", "medusa-shared-reduced", tmp_path)
