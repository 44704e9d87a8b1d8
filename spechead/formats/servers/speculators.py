"""The format of the `speculators` library: EAGLE-3 heads that name their target, for `vllm serve FOLDER`.

From the code of speculators 0.9 and vLLM 0.32. Layer ids are the inputs of the target's layers, as indices into
hidden_states are; norm_before_residual is on by default; the file contains the embedding.
"""

from __future__ import annotations

import json
from pathlib import Path

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse_unsupported
from spechead.formats.files import CONFIG, read_config, read_weights, write_files
from spechead.formats.foreign_head import ForeignHead, own_embedding, stored_embedding
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "speculators 0.9 and vLLM 0.32"
SUPPORTS = {"eagle3": frozenset({"layers", "n_layers", "rope_scaling", *eagle_layout.NORMS})}
REASONS: dict[str, str] = {}
IF_MISSING = "vLLM silently leaves it uninitialised, or the library zero"
IF_UNKNOWN = "vLLM stops at load, or silently ignores a bias"
NAMES_TARGET = True


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what the library would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    eagle_layout.refuse_outer_taps(head, SERVER)
    layers, inner = list(head.config.layers), eagle_layout.llama_config(head, info)
    if len(layers) != 3:  # vLLM's size of the fusion; the library itself counts the ids
        inner["num_aux_hidden_states"] = len(layers)
    drafts = {"proposal_type": "greedy", "speculative_tokens": max(head.depths, 3), "verifier_accept_k": 1}
    verifier = {"name_or_path": info.target_id, "architectures": [type(head.target.model).__name__]}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": head.draft_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": layers,
        "embed_requires_grad": False,
        **eagle_layout.norms(head.config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [drafts | {"accept_tolerance": 0.0}],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
        "torch_dtype": inner["torch_dtype"],
    }
    tensors = {}
    for name, tensor in eagle_layout.tensors(head, info.dtype).items():
        tensors[f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name] = tensor
    own = own_embedding(head.target)  # without any, the library's class silently uses zeros
    tensors["embed_tokens.weight"] = (stored_embedding(head.target) if own is None else own).to(info.dtype)
    write_files(folder, config, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as vLLM does. Raises UserError where it would stop, or no head here is equivalent."""
    config = read_config(folder / CONFIG)
    kind, inner = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(inner, dict):
        raise UserError(f"speculators_model_type is {kind!r}: heads here are read from eagle3 ones")
    try:
        proposal = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        verifier = config["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError):
        raise UserError("speculators_config lacks a proposal's speculative_tokens or the verifier's name") from None
    if not proposal or not verifier:
        raise UserError("speculators_config names no verifier, or no speculative_tokens: vLLM stops at load")
    if inner.get("model_type", "llama") != "llama":
        raise UserError(f"transformer_layer_config is a {inner['model_type']}: heads here have llama's layer")
    layers = config.get("eagle_aux_hidden_state_layer_ids") or eagle_layout.default_taps(target.n_layers)
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= target.n_layers:
        raise UserError(f"eagle_aux_hidden_state_layer_ids {layers}: needs ascending ids below {target.n_layers}")
    if inner.get("num_aux_hidden_states", 3) != len(layers):
        raise UserError(f"num_aux_hidden_states, vLLM's size of the fusion, is not that of the layers {layers}")
    norms = eagle_layout.norms(config) | {"norm_before_residual": bool(config.get("norm_before_residual", True))}
    inner = inner | {"draft_vocab_size": config.get("draft_vocab_size")}
    return eagle_layout.read_eagle3(inner, read_weights(folder), target, layers, norms)


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    settings = {"method": "eagle3", "model": folder, "num_speculative_tokens": max(head.depths, 3)}
    other = f"vllm serve {info.target_id} --speculative-config '{json.dumps(settings)}'"
    return f"vllm serve {folder}\n# or, with other settings:\n{other}"
