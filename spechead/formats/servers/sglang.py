"""SGLang: EAGLE-3 and EAGLE heads for `--speculative-draft-model-path`.

From the code of SGLang 0.5.23. EAGLE-3's layer ids are those of the layers whose outputs it reads: one less than
indices into hidden_states. A head's embedding is always replaced by the target's.

Legend: V target vocabulary, H hidden size.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse_reduced, refuse_unsupported
from spechead.formats.files import CONFIG, read_config, read_weights, write_files
from spechead.formats.foreign_head import ForeignHead
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "SGLang 0.5.23"
SUPPORTS = {
    "eagle": frozenset({"n_layers", "attention_bias", "fc_bias", "rope_scaling"}),
    "eagle3": frozenset({"layers", "n_layers", "rope_scaling", "norm_before_fc", "fc_norm", "norm_output"}),
}
REASONS = {"norm_before_residual": "SGLang ignores it"}
IF_MISSING = "SGLang silently leaves it random"
IF_UNKNOWN = "SGLang silently ignores it"
NAMES_TARGET = False
# SGLang's name for the norm before the attention differs in all decoder layers but the first.
_NORM = re.compile(r"^(layers\.[1-9]\d*\.)input_layernorm")
_SGLANG_NORM = re.compile(r"^(layers\.[1-9]\d*\.)hidden_norm")


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what SGLang would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    eagle_layout.refuse_scaled_embedding(head, SERVER)
    config, tensors = eagle_layout.llama_config(head, info), eagle_layout.tensors(head, info.dtype)
    if head.kind == "eagle3":
        eagle_layout.refuse_outer_taps(head, SERVER, first=1)
        layers = list(head.config.layers)
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_size}
        config |= eagle_layout.norms(head.config) | {"bias": False}
        tensors = {_NORM.sub(r"\1hidden_norm", name): tensor for name, tensor in tensors.items()}
        if layers != eagle_layout.default_taps(head.target.n_layers):
            ids = [layer - 1 for layer in layers]
            config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    else:
        eagle_layout.refuse_output_bias(head, SERVER)
        refuse_reduced(head, "SGLang reads an EAGLE head's vocabulary from a pickled token map, which is not written")
        size = head.config.hidden_size
        config |= {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": head.config.attention_bias}
        tensors.setdefault("fc.bias", torch.zeros(size, dtype=info.dtype))  # SGLang's fusion always has one
        if head.config.attention_bias:  # SGLang then has one after the attention as well
            for i in range(head.config.n_layers):
                tensors[f"layers.{i}.self_attn.o_proj.bias"] = torch.zeros(size, dtype=info.dtype)
    write_files(folder, config, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as SGLang does. Raises UserError if no head here is equivalent."""
    config, tensors = read_config(folder / CONFIG), read_weights(folder)
    architecture = str((config.get("architectures") or [""])[0])
    tensors.pop("embed_tokens.weight", None)  # as SGLang does
    if "Eagle3" in architecture or "norm.weight" in tensors:
        if "draft_vocab_size" not in config:
            raise UserError("draft_vocab_size is missing: SGLang stops at load")
        norms = eagle_layout.norms_of(config)
        if norms["norm_before_residual"]:
            raise UserError("norm_before_residual is set: SGLang ignores it")
        tensors = {_SGLANG_NORM.sub(r"\1input_layernorm", name): tensor for name, tensor in tensors.items()}
        return eagle_layout.read_eagle3(config, tensors, target, _layers(config, target), norms)
    if architecture != "LlamaForCausalLMEagle":
        raise UserError(f"architectures is {[architecture]}: SGLang loads LlamaForCausalLMEagle as an EAGLE head")
    if "fc.bias" not in tensors:
        raise UserError("fc.bias is missing: SGLang silently leaves it random")
    biased = bool(config.get("attention_bias", config.get("bias", False)))
    _remove_zero_biases(tensors, biased)
    return eagle_layout.read_eagle(config, tensors, biased)


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    steps, algorithm = max(head.depths, 3), head.kind.upper()
    return (
        f"python -m sglang.launch_server --model-path {info.target_id} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {steps} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {steps + 1}"
    )


def _layers(config: dict[str, object], target: Target) -> list[int]:
    eagle_config = config.get("eagle_config")
    ids = eagle_config.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle_config, dict) else None
    layers = [layer + 1 for layer in ids] if ids else eagle_layout.default_taps(target.n_layers)
    if layers != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < target.n_layers:
        raise UserError(f"eagle_aux_hidden_state_layer_ids {ids}: needs ascending ids from 0 to {target.n_layers - 2}")
    sized = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    if sized != len(layers):
        raise UserError(f"num_aux_hidden_states makes the fusion one of {sized} states, and {len(layers)} are tapped")
    return layers


def _remove_zero_biases(tensors: dict[str, torch.Tensor], biased: bool) -> None:
    """Remove zeros for biases that SGLang always has. Raises UserError for biases that no head here has."""
    optional = ["fc.bias", *(name for name in tensors if name.endswith("o_proj.bias"))]
    for name in optional:
        if not tensors[name].any():
            del tensors[name]
    if biased and any(name.endswith("o_proj.bias") for name in tensors):
        raise UserError("o_proj.bias is not zero: heads here have none")
