"""vLLM: EAGLE-3, EAGLE and Medusa heads for `--speculative-config`.

From the code of vLLM 0.32. EAGLE-3's layer ids are the inputs of the target's layers, as indices into hidden_states
are. A head's own embedding is kept if it differs from the target's.

Legend: V target vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse_reduced, refuse_unsupported
from spechead.formats.files import CONFIG, read_config, read_weights, write_files
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.heads import Head
from spechead.target.loading import dtype_name
from spechead.target.model import Target

SERVER = "vLLM 0.32"
SUPPORTS = {
    "eagle": frozenset({"n_layers", "attention_bias", "rope_scaling"}),
    "eagle3": frozenset({"layers", "n_layers", "rope_scaling", *eagle_layout.NORMS}),
    "medusa": frozenset({"n_heads", "n_layers", "output"}),
}
REASONS = {"fc_bias": "vLLM's fusion has no bias, and it ignores one silently"}
IF_MISSING = "vLLM silently leaves it uninitialised"
IF_UNKNOWN = "vLLM stops at load, or silently ignores a bias or a Medusa tensor"
NAMES_TARGET = False


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what vLLM would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    config, tensors = {"eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa}[head.kind](head, info)
    write_files(folder, config, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as vLLM does. Raises UserError where it would stop, or no head here is equivalent."""
    config, tensors = read_config(folder / CONFIG), read_weights(folder)
    architecture = str((config.get("architectures") or [""])[0])
    if config.get("model_type") == "medusa" or architecture.startswith("Medusa"):
        return _read_medusa(config, tensors, target)
    if "Eagle3" in architecture or "norm.weight" in tensors:
        layers = _layers(config, target)
        return eagle_layout.read_eagle3(config, tensors, target, layers, eagle_layout.norms_of(config))
    if "lm_head.weight" in tensors or "layers.0.input_layernorm.weight" in tensors:
        raise UserError("an EAGLE head with lm_head or layers.0.input_layernorm: vLLM stops at load")
    tensors.pop("fc.bias", None)  # as vLLM does
    biased = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    return eagle_layout.read_eagle(config, tensors, biased)


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    drafts = head.depths if head.kind == "medusa" else max(head.depths, 3)
    settings = {"method": head.kind, "model": folder, "num_speculative_tokens": drafts}
    return f"vllm serve {info.target_id} --speculative-config '{json.dumps(settings)}'"


# ------------------------------------------------------------------------------------------------ EAGLE


def _eagle3(head: Head, info: ExportInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    eagle_layout.refuse_outer_taps(head, SERVER)
    layers = list(head.config.layers)
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | eagle_layout.llama_config(head, info)
    config |= {"draft_vocab_size": head.draft_size, "eagle_aux_hidden_state_layer_ids": layers}
    config |= eagle_layout.norms(head.config)
    if len(layers) != 3:  # what the fusion is sized by
        config["num_aux_hidden_states"] = len(layers)
    return config, eagle_layout.tensors(head, info.dtype) | _embedding(head, info)


def _layers(config: dict[str, Any], target: Target) -> list[int]:
    eagle_config = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    layers = sorted(set(ids)) if ids else eagle_layout.default_taps(target.n_layers)
    if not all(isinstance(layer, int) and 0 <= layer < target.n_layers for layer in layers):
        raise UserError(f"eagle_aux_hidden_state_layer_ids {ids}: the target's layers are 0 to {target.n_layers - 1}")
    sized = config.get("num_aux_hidden_states") or len(eagle_config.get("eagle_aux_hidden_state_layer_ids") or [1] * 3)
    if sized != len(layers):
        raise UserError(f"num_aux_hidden_states makes the fusion one of {sized} states, and {len(layers)} are tapped")
    return layers


def _eagle(head: Head, info: ExportInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    eagle_layout.refuse_output_bias(head, SERVER)
    refuse_reduced(head, "vLLM computes EAGLE drafts with the target's whole output layer")
    config = {"architectures": ["LlamaForCausalLM"]} | eagle_layout.llama_config(head, info)
    config["qkv_bias"] = head.config.attention_bias  # attention_bias would add one after the attention, too
    return config, eagle_layout.tensors(head, info.dtype) | _embedding(head, info)


def _embedding(head: Head, info: ExportInfo) -> dict[str, Tensor]:
    """The embedding, for targets that scale theirs: vLLM gives heads the stored rows."""
    rows = own_embedding(head.target)
    return {} if rows is None else {"embed_tokens.weight": rows.to(info.dtype)}


# ------------------------------------------------------------------------------------------------ Medusa


def _medusa(head: Head, info: ExportInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    c = head.config
    refuse_reduced(head, "vLLM 0.32 fails to load a reduced vocabulary (token_map); train with draft_vocab_size 0")
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": c.hidden_size,
        "vocab_size": head.target.vocab_size,
        "num_heads": c.n_heads,
        "num_hidden_layers": c.n_layers,
        "medusa_fc_bias": True,
        "original_lm_head": c.output == "shared",
        "truncated_vocab_size": None,
        "torch_dtype": dtype_name(info.dtype),
    }
    tensors = {}
    for name, tensor in eagle_layout.tensors(head, info.dtype).items():
        tensors[re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)] = tensor
    if c.output == "shared":
        eagle_layout.refuse_output_bias(head, SERVER)
        tensors["lm_head.weight"] = head.target.output_rows(None)[0].to(info.dtype)
    return config, tensors


def _read_medusa(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> ForeignHead:
    if not config.get("medusa_fc_bias", False) and any(name.endswith(".bias") for name in tensors):
        raise UserError("medusa_fc_bias is not set: vLLM ignores the biases of the blocks")
    total = target.vocab_size
    if config.get("vocab_size", total) != total:
        raise UserError(f"vocab_size is {config['vocab_size']}, but the target has {total} tokens")
    shared = bool(config.get("original_lm_head", False))
    if (config.get("truncated_vocab_size") or total) != total or "token_map" in tensors:
        raise UserError("truncated_vocab_size and token_map: vLLM 0.32 fails to load its own token_map")
    renamed = {
        re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"blocks.\1.\2.linear.", name): tensor
        for name, tensor in tensors.items()
    }
    if shared:
        _remove_target_rows(renamed, target)
    options = {
        "n_heads": config.get("num_heads", config.get("medusa_num_heads", 5)),
        "n_layers": config.get("num_hidden_layers", config.get("medusa_num_layers", 1)),
        "output": "shared" if shared else "own",
        "draft_vocab_size": 0,
        "hidden_size": config.get("hidden_size", 4096),
    }
    return ForeignHead("medusa", options, renamed)


def _remove_target_rows(tensors: dict[str, Tensor], target: Target) -> None:
    """Remove the shared output layer. Raises UserError if it is not the target's own."""
    names = [name for name in ("lm_head.weight", "lm_heads.0.weight") if name in tensors]
    if not names:
        raise UserError("lm_head.weight is missing, and original_lm_head is set: vLLM leaves it uninitialised")
    rows = tensors.pop(names[0])
    own = target.output_rows(None)[0]
    if not rows.is_floating_point() or rows.shape != own.shape or not torch.equal(rows, own.to("cpu", rows.dtype)):
        raise UserError(f"{names[0]} is not the target's output layer, the only one that heads here can share")
