"""The EAGLE project's own files: EAGLE-3 and EAGLE heads for `EaModel.from_pretrained`.

From the code of SafeAILab/EAGLE in 2026. It uses the target's stored embedding, taps the default three layers, and
supports llama, qwen2, qwen3 and mixtral targets. It ignores missing and unknown tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, cannot_export, refuse_reduced, refuse_unsupported
from spechead.formats.files import CONFIG, WEIGHTS, read_config, read_weights, write_files
from spechead.formats.foreign_head import ForeignHead
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "EAGLE (SafeAILab, 2026)"
SUPPORTS = {
    "eagle": frozenset({"n_layers", "attention_bias", "fc_bias"}),
    "eagle3": frozenset({"layers"}),
}
REASONS = {"rope_scaling": "the EAGLE project has other settings for scaled positions"}
IF_MISSING = "EAGLE silently leaves it random"
IF_UNKNOWN = "EAGLE silently ignores it"
NAMES_TARGET = False
TARGETS = ("llama", "qwen2", "qwen3", "mixtral")


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what EAGLE would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    if head.target.config.model_type not in TARGETS:
        family, known = head.target.config.model_type, ", ".join(TARGETS)
        raise UserError(f"target {head.target.name!r} is a {family}: EAGLE supports only {known}")
    eagle_layout.refuse_scaled_embedding(head, SERVER)
    config = eagle_layout.llama_config(head, info)
    if head.kind == "eagle3":
        eagle_layout.require_default_taps(head, SERVER)
        config["draft_vocab_size"] = head.draft_size
    else:
        eagle_layout.refuse_output_bias(head, SERVER)
        _refuse_unlike_project(head)
        config |= {"bias": head.config.fc_bias, "qkv_bias": head.config.attention_bias}
    write_files(folder, config, eagle_layout.tensors(head, info.dtype))


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as EAGLE does. Raises UserError if no head here is equivalent."""
    config = read_config(folder / CONFIG)
    tensors = read_weights(folder, "pytorch_model.bin", WEIGHTS)  # in the order EAGLE looks for them
    tensors.pop("embed_tokens.weight", None)  # as EAGLE does
    if "draft_vocab_size" in config:
        return eagle_layout.read_eagle3(
            config, tensors, target, eagle_layout.default_taps(target.n_layers), _no_norms(config)
        )
    c = eagle_layout.layer_options(config)
    if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
        raise UserError(f"head_dim is {c['head_dim']}: EAGLE uses hidden_size / num_attention_heads")
    if config.get("bias", True) != ("fc.bias" in tensors):
        raise UserError(f"bias is {config.get('bias', True)}, which contradicts the tensors")
    return eagle_layout.read_eagle(config, tensors, bool(config.get("qkv_bias", False)))


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    eagle3 = head.kind == "eagle3"
    return (
        'python -c "from eagle.model.ea_model import EaModel; '
        f"EaModel.from_pretrained(base_model_path='{info.target_id}', ea_model_path='{folder}', use_eagle3={eagle3})\""
    )


def _no_norms(config: dict[str, Any]) -> dict[str, bool]:
    """The norms, all off. Raises UserError if one is set, since EAGLE supports none."""
    norms = eagle_layout.norms_of(config)
    if enabled := [name for name, on in norms.items() if on]:
        raise UserError(f"{', '.join(enabled)} is set: EAGLE ignores it")
    return norms


def _refuse_unlike_project(head: Head) -> None:
    c = head.config
    refuse_reduced(head, "EAGLE computes drafts with the target's whole output layer")
    if c.head_dim * c.num_attention_heads != c.hidden_size:
        size = c.hidden_size / c.num_attention_heads
        raise cannot_export("head_dim", c.head_dim, f"EAGLE uses hidden_size / num_attention_heads = {size:g}")
