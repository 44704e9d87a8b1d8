"""SGLang: EAGLE-3 and EAGLE heads for `--speculative-draft-model-path`.

Read off SGLang 0.5.23. EAGLE-3's layer ids are those of the layers whose outputs it reads: one less than indices into
hidden_states. A head's embedding is always replaced by the target's. Knows nothing of other servers.

Legend: V target vocabulary, H hidden size.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from spechead.errors import UserError
from spechead.files import write_json
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse
from spechead.formats.files import CONFIG, WEIGHTS, read_config, read_tensors, write_tensors
from spechead.formats.foreign_head import ForeignHead
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "SGLang 0.5.23"
CARRIES = {
    "eagle": frozenset({"n_layers", "attention_bias", "fc_bias", "rope_scaling"}),
    "eagle3": frozenset({"layers", "n_layers", "rope_scaling", "norm_before_fc", "fc_norm", "norm_output"}),
}
CANNOT = {"norm_before_residual": "SGLang does not read it, and would draft without"}
MISSING = "SGLang leaves it at random and says nothing"
UNKNOWN = "SGLang drops it in silence"
NAMES_TARGET = False
# The norm before the attention of all decoder layers but the first goes by another name there.
_LATER = re.compile(r"^(layers\.[1-9]\d*\.)input_layernorm")
_LATER_THERE = re.compile(r"^(layers\.[1-9]\d*\.)hidden_norm")


def save(head: Head, folder: Path, about: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what SGLang would drop or misread."""
    refuse(head, SERVER, CARRIES, CANNOT)
    eagle_layout.needs_plain_embedding(head, SERVER)
    config, tensors = eagle_layout.llama_config(head, about), eagle_layout.tensors(head, about.dtype)
    if head.kind == "eagle3":
        eagle_layout.needs_inner_layers(head, SERVER, first=1)
        layers = list(head.config.layers)
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_size}
        config |= eagle_layout.flags(head.config) | {"bias": False}
        tensors = {_LATER.sub(r"\1hidden_norm", name): tensor for name, tensor in tensors.items()}
        if layers != eagle_layout.usual_layers(head.target.n_layers):
            ids = [layer - 1 for layer in layers]
            config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    else:
        eagle_layout.needs_plain_output(head, SERVER)
        if head.reduced:
            raise UserError(
                f"head option draft_vocab_size={head.draft_size}: SGLang takes an EAGLE head's vocabulary from a "
                "pickled token map, which is not written"
            )
        size = head.config.hidden_size
        config |= {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": head.config.attention_bias}
        tensors.setdefault("fc.bias", torch.zeros(size, dtype=about.dtype))  # its fusion always has one
        if head.config.attention_bias:  # there, behind the attention as well
            for i in range(head.config.n_layers):
                tensors[f"layers.{i}.self_attn.o_proj.bias"] = torch.zeros(size, dtype=about.dtype)
    write_json(folder / CONFIG, config)
    write_tensors(folder / WEIGHTS, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """What SGLang would make of the folder; raises UserError where no head here is like it."""
    config, tensors = read_config(folder / CONFIG), read_tensors(folder)
    architecture = str((config.get("architectures") or [""])[0])
    tensors.pop("embed_tokens.weight", None)  # as SGLang does
    if "Eagle3" in architecture or "norm.weight" in tensors:
        if "draft_vocab_size" not in config:
            raise UserError("draft_vocab_size is missing: SGLang stops at load")
        norms = eagle_layout.flags_of(config)
        if norms["norm_before_residual"]:
            raise UserError("norm_before_residual is set: SGLang does not read it, and drafts without")
        tensors = {_LATER_THERE.sub(r"\1input_layernorm", name): tensor for name, tensor in tensors.items()}
        return eagle_layout.served_eagle3(config, tensors, target, _layers(config, target), norms)
    if architecture != "LlamaForCausalLMEagle":
        raise UserError(f"architectures is {[architecture]}: SGLang loads LlamaForCausalLMEagle as an EAGLE head")
    if "fc.bias" not in tensors:
        raise UserError("fc.bias is missing: SGLang leaves it at random and says nothing")
    biased = bool(config.get("attention_bias", config.get("bias", False)))
    _without_zero_biases(tensors, biased)
    return eagle_layout.served_eagle(config, tensors, biased)


def serve(head: Head, folder: str, about: ExportInfo) -> str:
    steps, algorithm = max(head.depths, 3), head.kind.upper()
    return (
        f"python -m sglang.launch_server --model-path {about.target_id} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {steps} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {steps + 1}"
    )


def _layers(config: dict[str, object], target: Target) -> list[int]:
    eagle_config = config.get("eagle_config")
    told = eagle_config.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle_config, dict) else None
    layers = [layer + 1 for layer in told] if told else eagle_layout.usual_layers(target.n_layers)
    if layers != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < target.n_layers:
        raise UserError(f"eagle_aux_hidden_state_layer_ids {told}: needs ascending ids from 0 to {target.n_layers - 2}")
    sized = config.get("num_aux_hidden_states") or (len(told) if told else 3)
    if sized != len(layers):
        raise UserError(f"num_aux_hidden_states makes the fusion one of {sized} states, and {len(layers)} are tapped")
    return layers


def _without_zero_biases(tensors: dict[str, torch.Tensor], biased: bool) -> None:
    """Biases that SGLang has and heads here may lack are left out where they are zero."""
    optional = ["fc.bias", *(name for name in tensors if name.endswith("o_proj.bias"))]
    for name in optional:
        if not tensors[name].any():
            del tensors[name]
    if biased and any(name.endswith("o_proj.bias") for name in tensors):
        raise UserError("o_proj.bias is not zero: heads here have none")
