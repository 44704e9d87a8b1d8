"""vLLM: EAGLE-3, EAGLE and Medusa heads for `--speculative-config`.

Read off vLLM 0.32. EAGLE-3's layer ids are the inputs of the target's layers, as indices into hidden_states are. A
head's own embedding is kept where it differs from the target's. Knows nothing of other servers.

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
from spechead.files import write_json
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse
from spechead.formats.files import CONFIG, WEIGHTS, read_config, read_tensors, write_tensors
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "vLLM 0.32"
CARRIES = {
    "eagle": frozenset({"n_layers", "attention_bias", "rope_scaling"}),
    "eagle3": frozenset({"layers", "n_layers", "rope_scaling", *eagle_layout.FLAGS}),
    "medusa": frozenset({"n_heads", "n_layers", "output"}),
}
CANNOT = {"fc_bias": "vLLM's fusion has no bias, and drops one in silence"}
MISSING = "vLLM leaves it uninitialised and says nothing"
UNKNOWN = "vLLM stops at load, or for a bias or a Medusa tensor drops it in silence"
NAMES_TARGET = False


def save(head: Head, folder: Path, about: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what vLLM would drop or misread."""
    refuse(head, SERVER, CARRIES, CANNOT)
    config, tensors = {"eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa}[head.kind](head, about)
    write_json(folder / CONFIG, config)
    write_tensors(folder / WEIGHTS, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """What vLLM would make of the folder; raises UserError where it would stop, or no head here is like it."""
    config, tensors = read_config(folder / CONFIG), read_tensors(folder)
    architecture = str((config.get("architectures") or [""])[0])
    if config.get("model_type") == "medusa" or architecture.startswith("Medusa"):
        return _served_medusa(config, tensors, target)
    if "Eagle3" in architecture or "norm.weight" in tensors:
        layers = _layers(config, target)
        return eagle_layout.served_eagle3(config, tensors, target, layers, eagle_layout.flags_of(config))
    if "lm_head.weight" in tensors or "layers.0.input_layernorm.weight" in tensors:
        raise UserError("an EAGLE head with lm_head or layers.0.input_layernorm: vLLM stops at load")
    tensors.pop("fc.bias", None)  # as vLLM does
    biased = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    return eagle_layout.served_eagle(config, tensors, biased)


def serve(head: Head, folder: str, about: ExportInfo) -> str:
    drafts = head.depths if head.kind == "medusa" else max(head.depths, 3)
    settings = {"method": head.kind, "model": folder, "num_speculative_tokens": drafts}
    return f"vllm serve {about.target_id} --speculative-config '{json.dumps(settings)}'"


# ------------------------------------------------------------------------------------------------ EAGLE


def _eagle3(head: Head, about: ExportInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    eagle_layout.needs_inner_layers(head, SERVER)
    layers = list(head.config.layers)
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | eagle_layout.llama_config(head, about)
    config |= {"draft_vocab_size": head.draft_size, "eagle_aux_hidden_state_layer_ids": layers}
    config |= eagle_layout.flags(head.config)
    if len(layers) != 3:  # what the fusion is sized by
        config["num_aux_hidden_states"] = len(layers)
    return config, eagle_layout.tensors(head, about.dtype) | _embedding(head, about)


def _layers(config: dict[str, Any], target: Target) -> list[int]:
    eagle_config = config.get("eagle_config") or {}
    told = config.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    layers = sorted(set(told)) if told else eagle_layout.usual_layers(target.n_layers)
    if not all(isinstance(layer, int) and 0 <= layer < target.n_layers for layer in layers):
        raise UserError(f"eagle_aux_hidden_state_layer_ids {told}: the target's layers are 0 to {target.n_layers - 1}")
    sized = config.get("num_aux_hidden_states") or len(eagle_config.get("eagle_aux_hidden_state_layer_ids") or [1] * 3)
    if sized != len(layers):
        raise UserError(f"num_aux_hidden_states makes the fusion one of {sized} states, and {len(layers)} are tapped")
    return layers


def _eagle(head: Head, about: ExportInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    eagle_layout.needs_plain_output(head, SERVER)
    if head.reduced:
        raise UserError(
            f"head option draft_vocab_size={head.draft_size}: vLLM reads EAGLE drafts from the target's whole output "
            "layer; nothing is written"
        )
    config = {"architectures": ["LlamaForCausalLM"]} | eagle_layout.llama_config(head, about)
    config["qkv_bias"] = head.config.attention_bias  # attention_bias would ask for one behind the attention, too
    return config, eagle_layout.tensors(head, about.dtype) | _embedding(head, about)


def _embedding(head: Head, about: ExportInfo) -> dict[str, Tensor]:
    """The embedding, for targets that scale theirs: vLLM hands heads the stored rows."""
    rows = own_embedding(head.target)
    return {} if rows is None else {"embed_tokens.weight": rows.to(about.dtype)}


# ------------------------------------------------------------------------------------------------ Medusa


def _medusa(head: Head, about: ExportInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    c = head.config
    if head.reduced:
        raise UserError(
            f"head option draft_vocab_size={head.draft_size}: vLLM 0.32 stops at load of a reduced vocabulary, as it "
            "misses its own token_map; train with draft_vocab_size 0; nothing is written"
        )
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
        "torch_dtype": str(about.dtype).removeprefix("torch."),
    }
    tensors = {}
    for name, tensor in eagle_layout.tensors(head, about.dtype).items():
        tensors[re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)] = tensor
    if c.output == "shared":
        eagle_layout.needs_plain_output(head, SERVER)
        tensors["lm_head.weight"] = head.target.output_rows(None)[0].to(about.dtype)
    return config, tensors


def _served_medusa(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> ForeignHead:
    if not config.get("medusa_fc_bias", False) and any(name.endswith(".bias") for name in tensors):
        raise UserError("medusa_fc_bias is not set: vLLM drops the biases of the blocks")
    total = target.vocab_size
    if config.get("vocab_size", total) != total:
        raise UserError(f"vocab_size is {config['vocab_size']}, but the target has {total} tokens")
    shared = bool(config.get("original_lm_head", False))
    if (config.get("truncated_vocab_size") or total) != total or "token_map" in tensors:
        raise UserError(
            "truncated_vocab_size and token_map: vLLM 0.32 stops at load, since it misses its own token_map"
        )
    found = {
        re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"blocks.\1.\2.linear.", name): tensor
        for name, tensor in tensors.items()
    }
    if shared:
        _needs_target_rows(found, target)
    options = {
        "n_heads": config.get("num_heads", config.get("medusa_num_heads", 5)),
        "n_layers": config.get("num_hidden_layers", config.get("medusa_num_layers", 1)),
        "output": "shared" if shared else "own",
        "draft_vocab_size": 0,
        "hidden_size": config.get("hidden_size", 4096),
    }
    return ForeignHead("medusa", options, found)


def _needs_target_rows(found: dict[str, Tensor], target: Target) -> None:
    """Take the shared output layer out of `found`; it must be the target's own."""
    names = [name for name in ("lm_head.weight", "lm_heads.0.weight") if name in found]
    if not names:
        raise UserError("lm_head.weight is missing, and original_lm_head is set: vLLM leaves it uninitialised")
    rows = found.pop(names[0])
    ours = target.output_rows(None)[0]
    if not rows.is_floating_point() or rows.shape != ours.shape or not torch.equal(rows, ours.to("cpu", rows.dtype)):
        raise UserError(f"{names[0]} is not the target's output layer; heads here share that one alone")
