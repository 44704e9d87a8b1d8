"""llama.cpp: EAGLE-3 heads as one GGUF file, for `llama-server --spec-type draft-eagle3`.

Names and settings are those of its converter (convert_hf_to_gguf.py of 2026-09): layer ids are the inputs of the
target's layers, as indices into hidden_states are, under the names that older and newer builds read; d2t contains
target ids, not offsets; rows of queries and keys are reordered for its rotation of neighbouring pairs; the tokenizer is
copied from the target's own GGUF file.

Legend: N heads, C head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, cannot_export, refuse_unsupported
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.formats.gguf_file import Gguf, file_type, read_gguf, write_gguf
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "llama.cpp b9723 and 0c1e57098"
SUPPORTS = {"eagle3": frozenset({"layers", "norm_before_residual"})}
REASONS = {"rope_scaling": "only positions without scaling are written for llama.cpp"}
IF_MISSING = "llama.cpp stops at load, or uses the target's output layer for a missing output.weight"
IF_UNKNOWN = "llama.cpp stops at load, since the number of tensors is another than it expects"
NAMES_TARGET = False
ARCHITECTURE, FILE = "eagle3", "model.gguf"
_TAPS = 3
_LAYERS = ("extract_layers", "target_layers")  # names of the taps in builds up to about b9723, and in later ones
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


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write model.gguf; raises UserError for what llama.cpp would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    eagle_layout.refuse_outer_taps(head, SERVER, first=1)
    c = head.config
    if len(c.layers) != _TAPS:
        raise cannot_export("layers", list(c.layers), f"{SERVER} taps three layers")
    if info.tokens_from is None:
        raise UserError("option target_gguf: is missing; llama.cpp reads the tokenizer from the head's file, too")
    tokenizer = read_gguf(info.tokens_from, settings_only=True)
    tokenizer.settings = {name: value for name, value in tokenizer.settings.items() if name.startswith("tokenizer.")}
    if not tokenizer.settings.get("tokenizer.ggml.tokens"):
        raise UserError(f"option target_gguf: {info.tokens_from} has no tokenizer")
    tensors = {}
    for name, tensor in eagle_layout.tensors(head, torch.float32).items():
        if name in _NAMES:
            converted = _to_gguf(name, tensor, c.num_attention_heads, c.num_key_value_heads)
            tensors[_NAMES[name]] = converted.to(info.dtype) if converted.dim() > 1 else converted  # norms in float32
        elif name != "t2d":
            raise UserError(f"head tensor {name}: the export to {SERVER} does not know it")
    if (rows := own_embedding(head.target)) is not None:
        tensors["token_embd.weight"] = rows.to(info.dtype)
    write_gguf(folder / FILE, ARCHITECTURE, _settings(head, info), tokenizer, tensors)


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the file as llama.cpp does. Raises UserError where it would stop, or no head here is equivalent."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"{folder} has {len(files)} GGUF files: one is expected")
    file = read_gguf(files[0])
    if file.settings.get("general.architecture") != ARCHITECTURE:
        raise UserError(f"general.architecture is {file.settings.get('general.architecture')}, not {ARCHITECTURE}")
    config = _config(file, target)
    layers = _layers(file, target)
    names = {gguf: name for name, gguf in _NAMES.items()} | {"token_embd.weight": "embed_tokens.weight"}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for gguf, tensor in file.tensors.items():
        name = names.get(gguf, gguf)
        tensors[name] = _from_gguf(name, tensor, heads, groups)
    norms = dict.fromkeys(eagle_layout.NORMS, False)
    norms["norm_before_residual"] = bool(file.settings.get(f"{ARCHITECTURE}.norm_before_residual", False))
    return eagle_layout.read_eagle3(config, tensors, target, layers, norms)


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    name = info.target_id.rpartition("/")[2]
    drafts = max(head.depths, 3)
    return f"llama-server -m {name}.gguf -md {folder}/{FILE} --spec-type draft-eagle3 --spec-draft-n-max {drafts}"


# ------------------------------------------------------------------------------------------------ settings and tensors


def _settings(head: Head, info: ExportInfo) -> dict[str, Any]:
    c, target = head.config, head.target
    return {
        "general.type": "model",
        "general.name": f"EAGLE-3 head for {info.target_id}",
        "general.file_type": file_type(info.dtype),
        "block_count": 1,
        "context_length": eagle_layout.max_positions(target),
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
    """The taps, under either of their names."""
    named = {name: file.settings[key] for name in _LAYERS if (key := f"{ARCHITECTURE}.{name}") in file.settings}
    if not named:
        raise UserError(f"the file gives no {' or '.join(_LAYERS)}: llama.cpp stops at load")
    layers: list[int] = next(iter(named.values()))
    if any(other != layers for other in named.values()):
        raise UserError(
            f"{' and '.join(f'{name} {ids}' for name, ids in named.items())}: builds would tap other layers"
        )
    if len(layers) != _TAPS or layers != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < target.n_layers:
        raise UserError(f"{next(iter(named))} {layers}: needs three ascending layers from 1 to {target.n_layers - 1}")
    return layers


def _config(file: Gguf, target: Target) -> dict[str, Any]:
    """The settings as keys of a llama configuration."""
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
    settings = {name.removeprefix(f"{ARCHITECTURE}."): value for name, value in file.settings.items()}
    if absent := [name for name in wanted if name not in settings]:
        raise UserError(f"the file gives no {', '.join(absent)}: llama.cpp stops at load, or uses its defaults")
    for name, supported in (
        ("attention.value_length", settings["attention.key_length"]),
        ("rope.dimension_count", settings["attention.key_length"]),
        ("target_hidden_size", target.hidden_size),
    ):
        if settings.get(name, supported) != supported:
            raise UserError(f"{name} is {settings[name]}: heads here draft with {supported}")
    if "blk.0.rope_freqs.weight" in file.tensors or "rope.scaling.type" in settings:
        raise UserError("scaled positions are not read from llama.cpp's files")
    size = file.tensors["d2t"].shape[0] if "d2t" in file.tensors else target.vocab_size
    config = {name: settings[gguf] for gguf, name in wanted.items()} | {"draft_vocab_size": size}
    config["rms_norm_eps"] = _shortest(config["rms_norm_eps"])
    config["rope_theta"] = _shortest(config["rope_theta"])
    return config


def _to_gguf(name: str, tensor: Tensor, heads: int, groups: int) -> Tensor:
    if name == "d2t":
        return tensor + torch.arange(tensor.shape[0])
    reordered = _reordered_heads(name, heads, groups)
    return _pairs(tensor, reordered) if reordered else tensor


def _from_gguf(name: str, tensor: Tensor, heads: int, groups: int) -> Tensor:
    if name == "d2t":
        return tensor.flatten() - torch.arange(tensor.numel())
    reordered = _reordered_heads(name, heads, groups)
    return _halves(tensor, reordered) if reordered else tensor


def _reordered_heads(name: str, heads: int, groups: int) -> int:
    """The number of heads of a projection whose rows are reordered, else 0."""
    return heads if name.endswith("q_proj.weight") else groups if name.endswith("k_proj.weight") else 0


def _pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows [N*C, inputs] of each head from halves to neighbouring pairs."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _halves(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `_pairs`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the float32 in the file: 1e-05 rather than 9.99999974e-06."""
    single = torch.tensor(value, dtype=torch.float32)
    return next(
        float(text) for digits in range(1, 17) if torch.tensor(float(text := f"{value:.{digits}g}")).float() == single
    )
