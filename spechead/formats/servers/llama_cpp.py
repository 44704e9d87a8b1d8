"""llama.cpp: EAGLE-3 heads as one GGUF file, for `llama-server --spec-type draft-eagle3`.

Names and settings are those that its converter writes (convert_hf_to_gguf.py of 2026-09): layer ids are the inputs of
the target's layers, as indices into hidden_states are, under the two names that older and newer builds read them by;
d2t holds target ids, not offsets; rows of queries and keys are reordered for its rotation of neighbouring pairs; the
tokenizer is the target's, copied from the target's own GGUF file.

Legend: N heads, C head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.formats.gguf_file import Gguf, file_type, read_gguf, write_gguf
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "llama.cpp b9723 and 0c1e57098"
CARRIES = {"eagle3": frozenset({"layers", "norm_before_residual"})}
CANNOT = {"rope_scaling": "only positions without scaling are written for llama.cpp"}
MISSING = "llama.cpp stops at load, or takes the target's output layer for a missing output.weight"
UNKNOWN = "llama.cpp stops at load, as the number of tensors is not what it made"
NAMES_TARGET = False
ARCHITECTURE, FILE = "eagle3", "model.gguf"
_TAPS = 3
_LAYERS = ("extract_layers", "target_layers")  # by which builds up to about b9723, and later ones, know the taps
_NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def save(head: Head, folder: Path, about: ExportInfo) -> None:
    """Write model.gguf; raises UserError for what llama.cpp would drop or misread."""
    refuse(head, SERVER, CARRIES, CANNOT)
    eagle_layout.needs_inner_layers(head, SERVER, first=1)
    c = head.config
    if len(c.layers) != _TAPS:
        raise UserError(f"head option layers={list(c.layers)}: {SERVER} taps three layers; nothing is written")
    if about.tokens_from is None:
        raise UserError("option target-gguf is missing: llama.cpp reads the tokenizer from the head's file, too")
    tokenizer = read_gguf(about.tokens_from, settings_only=True)
    tokenizer.settings = {name: value for name, value in tokenizer.settings.items() if name.startswith("tokenizer.")}
    if not tokenizer.settings.get("tokenizer.ggml.tokens"):
        raise UserError(f"option target-gguf: {about.tokens_from} holds no tokenizer")
    tensors = {}
    for name, tensor in eagle_layout.tensors(head, torch.float32).items():
        if name in _NAMES:
            told = _written(name, tensor, c.num_attention_heads, c.num_key_value_heads)
            tensors[_NAMES[name]] = told.to(about.dtype) if told.dim() > 1 else told  # norms stay float32, as there
        elif name != "t2d":
            raise UserError(f"head tensor {name}: the export to {SERVER} does not know it")
    if (rows := own_embedding(head.target)) is not None:
        tensors["token_embd.weight"] = rows.to(about.dtype)
    write_gguf(folder / FILE, ARCHITECTURE, _settings(head, about), tokenizer, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """What llama.cpp would make of the folder; raises UserError where it would stop, or no head here is like it."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"{folder} holds {len(files)} GGUF files: one is expected")
    file = read_gguf(files[0])
    if file.settings.get("general.architecture") != ARCHITECTURE:
        raise UserError(f"general.architecture is {file.settings.get('general.architecture')}, not {ARCHITECTURE}")
    config = _config(file, target)
    layers = _layers(file, target)
    names = {theirs: ours for ours, theirs in _NAMES.items()} | {"token_embd.weight": "embed_tokens.weight"}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for name, tensor in file.tensors.items():
        ours = names.get(name, name)
        tensors[ours] = _read(ours, tensor, heads, groups)
    norms = dict.fromkeys(eagle_layout.FLAGS, False)
    norms["norm_before_residual"] = bool(file.settings.get(f"{ARCHITECTURE}.norm_before_residual", False))
    return eagle_layout.served_eagle3(config, tensors, target, layers, norms)


def serve(head: Head, folder: str, about: ExportInfo) -> str:
    name = about.target_id.rpartition("/")[2]
    drafts = max(head.depths, 3)
    return f"llama-server -m {name}.gguf -md {folder}/{FILE} --spec-type draft-eagle3 --spec-draft-n-max {drafts}"


# ------------------------------------------------------------------------------------------------ words


def _settings(head: Head, about: ExportInfo) -> dict[str, Any]:
    c, target = head.config, head.target
    return {
        "general.type": "model",
        "general.name": f"EAGLE-3 head for {about.target_id}",
        "general.file_type": file_type(about.dtype),
        "block_count": 1,
        "context_length": eagle_layout.longest(target),
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(c.rope_theta),
        "rope.dimension_count": c.head_dim,
        "vocab_size": target.vocab_size,
        **{name: list(c.layers) for name in _LAYERS},
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": c.norm_before_residual,
    }


def _layers(file: Gguf, target: Target) -> list[int]:
    """The taps, under whichever of their names the file has."""
    told = {name: file.settings[key] for name in _LAYERS if (key := f"{ARCHITECTURE}.{name}") in file.settings}
    if not told:
        raise UserError(f"the file gives no {' or '.join(_LAYERS)}: llama.cpp stops at load")
    layers: list[int] = next(iter(told.values()))
    if any(other != layers for other in told.values()):
        raise UserError(f"{' and '.join(f'{name} {ids}' for name, ids in told.items())}: builds would tap other layers")
    if len(layers) != _TAPS or layers != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < target.n_layers:
        raise UserError(f"{next(iter(told))} {layers}: needs three ascending layers from 1 to {target.n_layers - 1}")
    return layers


def _config(file: Gguf, target: Target) -> dict[str, Any]:
    """The settings in llama's words."""
    wanted = {
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "block_count": "num_hidden_layers",
        "vocab_size": "vocab_size",
    }
    told = {name.removeprefix(f"{ARCHITECTURE}."): value for name, value in file.settings.items()}
    if absent := [name for name in wanted if name not in told]:
        raise UserError(f"the file gives no {', '.join(absent)}: llama.cpp stops at load, or takes its defaults")
    for name, ours in (
        ("attention.value_length", told["attention.key_length"]),
        ("rope.dimension_count", told["attention.key_length"]),
        ("target_hidden_size", target.hidden_size),
    ):
        if told.get(name, ours) != ours:
            raise UserError(f"{name} is {told[name]}: heads here draft with {ours}")
    if "blk.0.rope_freqs.weight" in file.tensors or "rope.scaling.type" in told:
        raise UserError("scaled positions are not read from llama.cpp's files")
    size = file.tensors["d2t"].shape[0] if "d2t" in file.tensors else target.vocab_size
    config = {ours: told[theirs] for theirs, ours in wanted.items()} | {"draft_vocab_size": size}
    config["rms_norm_eps"] = _shortest(config["rms_norm_eps"])
    config["rope_theta"] = _shortest(config["rope_theta"])
    return config


def _written(name: str, tensor: Tensor, heads: int, groups: int) -> Tensor:
    if name == "d2t":
        return tensor + torch.arange(tensor.shape[0])
    turned = _count(name, heads, groups)
    return _pairs(tensor, turned) if turned else tensor


def _read(name: str, tensor: Tensor, heads: int, groups: int) -> Tensor:
    if name == "d2t":
        return tensor.flatten() - torch.arange(tensor.numel())
    turned = _count(name, heads, groups)
    return _halves(tensor, turned) if turned else tensor


def _count(name: str, heads: int, groups: int) -> int:
    """Heads of a projection whose rows are reordered, else 0."""
    return heads if name.endswith("q_proj.weight") else groups if name.endswith("k_proj.weight") else 0


def _pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows [N*C, inputs] of each head from halves to neighbouring pairs."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _halves(rows: Tensor, heads: int) -> Tensor:
    """And back."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _shortest(value: float) -> float:
    """The shortest decimal that a float32 of the file stands for: 1e-05 rather than 9.99999974e-06."""
    single = torch.tensor(value, dtype=torch.float32)
    return next(
        float(text) for digits in range(1, 17) if torch.tensor(float(text := f"{value:.{digits}g}")).float() == single
    )
