"""The names, shapes and settings of the tiny exports, written out by hand.

A mistake made alike in writing and in reading would pass a round trip.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from spechead.formats.export import write_export
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
