"""The very names, shapes and numbers that each server's loader reads, written out by hand.

A mistake made alike in writing and in reading would pass a round trip.
"""

from __future__ import annotations

import copy
import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spechead.errors import UserError
from spechead.formats.export import write_export
from spechead.formats.gguf_file import read_gguf
from spechead.formats.servers import llama_cpp
from tests.helpers.exporting import export_info, make_head, tiny

H, WIDE, TOKENS, DRAFT = 32, 48, 97, 40
EAGLE3 = {
    "d2t": (DRAFT,),
    "t2d": (TOKENS,),
    "fc.weight": (H, 3 * H),
    "lm_head.weight": (DRAFT, H),
    "norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (H, 2 * H),
    "midlayer.self_attn.k_proj.weight": (16, 2 * H),
    "midlayer.self_attn.v_proj.weight": (16, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, H),
    "midlayer.mlp.gate_proj.weight": (WIDE, H),
    "midlayer.mlp.up_proj.weight": (WIDE, H),
    "midlayer.mlp.down_proj.weight": (H, WIDE),
}
LAYER = {
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": TOKENS,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "model_type": "llama",
}
NO_NORMS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def export(
    form: str, name: str, tmp_path: Path, family: str = "llama"
) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    tmp_path.mkdir(exist_ok=True)
    out = tmp_path / "out"
    write_export(make_head(name, tiny(family)), form, out, export_info(tiny(family), tmp_path))
    if form == "llama.cpp":
        return {}, {}, out
    weights = next(out.glob("*.safetensors"))
    return json.loads((out / "config.json").read_text()), load_file(weights), out


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def has(config: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return {key: config.get(key) for key in wanted} == wanted


def without_prefix(layer: str) -> dict[str, tuple[int, ...]]:
    return {name.replace("midlayer.", layer): shape for name, shape in EAGLE3.items()}


# ------------------------------------------------------------------------------------------------ vLLM


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


# ------------------------------------------------------------------------------------------------ SGLang


def test_sglang_eagle3_leaves_the_usual_layers_out(tmp_path: Path) -> None:
    config, tensors, _ = export("sglang", "eagle3", tmp_path)
    assert shapes(tensors) == EAGLE3
    assert has(config, LAYER | NO_NORMS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT})
    assert "eagle_config" not in config and "eagle_aux_hidden_state_layer_ids" not in config


def test_sglang_counts_the_layers_whose_outputs_it_reads(tmp_path: Path) -> None:
    config, _, _ = export("sglang", "eagle3-other-taps", tmp_path)  # hidden_states 1, 3, 6
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    assert config["eagle_config"] == ids


def test_sglang_calls_the_norms_of_later_layers_otherwise(tmp_path: Path) -> None:
    _, tensors, _ = export("sglang", "eagle3-layers", tmp_path)
    head = make_head("eagle3-layers", tiny("llama")).state_dict()
    for i in (1, 2):
        assert f"layers.{i}.input_layernorm.weight" not in tensors
        assert torch.equal(tensors[f"layers.{i}.hidden_norm.weight"], head[f"layers.{i}.input_layernorm.weight"])
    assert torch.equal(tensors["midlayer.hidden_norm.weight"], head["midlayer.hidden_norm.weight"])


def test_sglang_eagle_has_a_bias_behind_its_fusion(tmp_path: Path) -> None:
    config, tensors, _ = export("sglang", "eagle-layers", tmp_path)
    assert has(config, {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": True})
    zeros = ["fc.bias", "layers.0.self_attn.o_proj.bias", "layers.1.self_attn.o_proj.bias"]
    assert all(tensors[name].shape == (H,) and not tensors[name].any() for name in zeros)


# ------------------------------------------------------------------------------------------------ others


def test_eagle_project(tmp_path: Path) -> None:
    config, tensors, _ = export("eagle", "eagle3", tmp_path / "a")
    assert shapes(tensors) == EAGLE3 and config["draft_vocab_size"] == DRAFT
    config, tensors, _ = export("eagle", "eagle-bias", tmp_path / "b")
    assert config["bias"] is True and config["qkv_bias"] is False and "fc.bias" in tensors
    config, tensors, _ = export("eagle", "eagle-layers", tmp_path / "c")
    assert config["bias"] is False and config["qkv_bias"] is True and "fc.bias" not in tensors


def test_speculators(tmp_path: Path) -> None:
    config, tensors, _ = export("speculators", "eagle3", tmp_path)
    assert shapes(tensors) == without_prefix("layers.0.") | {"embed_tokens.weight": (TOKENS, H)}
    assert torch.equal(tensors["embed_tokens.weight"], tiny("llama").model.get_input_embeddings().weight)
    assert has(config, NO_NORMS | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]})
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and config["draft_vocab_size"] == DRAFT
    assert has(config["transformer_layer_config"], LAYER)
    inner = config["speculators_config"]
    assert inner["algorithm"] == "eagle3" and inner["default_proposal_method"] == "greedy"
    assert inner["proposal_methods"][0]["speculative_tokens"] == 3
    assert inner["verifier"] == {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}


def test_medusa_files(tmp_path: Path) -> None:
    for form in ("tgi", "trtllm"):
        config, tensors, out = export(form, "medusa-blocks", tmp_path / form)
        assert has(config, {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "org/model"})
        assert "architectures" not in config and "model_type" not in config
        blocks = {f"{k}.{i}.linear.{what}" for k in (0, 1) for i in (0, 1) for what in ("weight", "bias")}
        assert tensors.keys() == blocks | {"0.2.weight", "1.2.weight"}
        assert (out / "medusa_lm_head.safetensors").is_file()


def test_trtllm_eagle3(tmp_path: Path) -> None:
    config, tensors, _ = export("trtllm", "eagle3-fusion", tmp_path)
    assert shapes(tensors) == EAGLE3 | {"input_norm.weight": (3 * H,)}
    assert config["eagle_config"] == {"norm_before_fc": True}
    assert has(config, LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT})


def test_llama_cpp(tmp_path: Path) -> None:
    _, _, out = export("llama.cpp", "eagle3-other-taps", tmp_path)
    file = read_gguf(out / "model.gguf")
    head = make_head("eagle3-other-taps", tiny("llama")).state_dict()
    told = {name: value for name, value in file.settings.items() if not name.startswith("tokenizer.")}
    assert told == {
        "general.architecture": "eagle3",
        "general.type": "model",
        "general.name": "EAGLE-3 head for org/model",
        "general.file_type": 0,
        "eagle3.block_count": 1,
        "eagle3.context_length": 256,
        "eagle3.embedding_length": H,
        "eagle3.feed_forward_length": WIDE,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 8,
        "eagle3.attention.value_length": 8,
        "eagle3.attention.layer_norm_rms_epsilon": torch.tensor(1e-6).item(),
        "eagle3.rope.freq_base": 10000.0,
        "eagle3.rope.dimension_count": 8,
        "eagle3.vocab_size": TOKENS,
        "eagle3.extract_layers": [1, 3, 6],
        "eagle3.target_layers": [1, 3, 6],
        "eagle3.target_hidden_size": H,
        "eagle3.norm_before_residual": False,
    }
    assert file.settings["tokenizer.ggml.tokens"][3] == tiny("llama").tokenizer.convert_ids_to_tokens(3)
    assert file.tensors["d2t"].tolist() == list(range(1, 80, 2)) and file.tensors["d2t"].dtype == torch.int64
    same = {
        "fc.weight": "fc.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
        "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
        "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
    }
    assert file.tensors.keys() == same.keys() | {"d2t", "blk.0.attn_q.weight", "blk.0.attn_k.weight"}
    assert all(torch.equal(file.tensors[theirs], head[ours]) for theirs, ours in same.items())
    query, key = (head[f"midlayer.self_attn.{part}_proj.weight"] for part in "qk")
    first = [0, 4, 1, 5, 2, 6, 3, 7]  # rows of one head of size 8: each beside its partner of the other half
    assert torch.equal(file.tensors["blk.0.attn_q.weight"][:8], query[first])
    assert torch.equal(file.tensors["blk.0.attn_q.weight"][24:], query[24:][first])
    assert torch.equal(file.tensors["blk.0.attn_k.weight"][8:], key[8:][first])


def test_llama_cpp_opens_its_file(tmp_path: Path) -> None:
    """The library that llama-cpp-python brings takes every setting and tensor; drafting with it needs its server."""
    library = pytest.importorskip("llama_cpp")
    _, _, out = export("llama.cpp", "eagle3-other-taps", tmp_path)
    model = library.llama_model_load_from_file(str(out / "model.gguf").encode(), library.llama_model_default_params())
    assert model, "it does not open"
    said = {}
    for name in ("general.architecture", "eagle3.target_hidden_size"):
        text = ctypes.create_string_buffer(64)
        library.llama_model_meta_val_str(model, name.encode(), text, 64)
        said[name] = text.value.decode()
    tokens = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    library.llama_model_free(model)
    assert said == {"general.architecture": "eagle3", "eagle3.target_hidden_size": str(H)}
    assert tokens == len(tiny("llama").tokenizer)


def test_layers_by_both_names_are_the_same(tmp_path: Path) -> None:
    _, _, out = export("llama.cpp", "eagle3-other-taps", tmp_path)
    file = read_gguf(out / "model.gguf")
    first, second = (f"eagle3.{name}" for name in ("extract_layers", "target_layers"))
    assert llama_cpp._layers(file, tiny("llama")) == [1, 3, 6]
    older, other, neither = (copy.deepcopy(file) for _ in range(3))
    del older.settings[second]
    assert llama_cpp._layers(older, tiny("llama")) == [1, 3, 6]
    other.settings[second] = [1, 3, 5]
    with pytest.raises(UserError, match=r"extract_layers \[1, 3, 6\] and target_layers \[1, 3, 5\]: builds"):
        llama_cpp._layers(other, tiny("llama"))
    del neither.settings[first], neither.settings[second]
    with pytest.raises(UserError, match="no extract_layers or target_layers: llama.cpp stops"):
        llama_cpp._layers(neither, tiny("llama"))
