"""The EAGLE project's own files: EAGLE-3 and EAGLE heads for `EaModel.from_pretrained`.

Read off SafeAILab/EAGLE of 2026. It reads the target's stored embedding, taps the usual three layers, and knows llama,
qwen2, qwen3 and mixtral targets. Missing and unknown tensors are ignored. Knows nothing of servers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spechead.errors import UserError
from spechead.files import write_json
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse
from spechead.formats.files import CONFIG, WEIGHTS, read_config, read_tensors, write_tensors
from spechead.formats.foreign_head import ForeignHead
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "EAGLE (SafeAILab, 2026)"
CARRIES = {
    "eagle": frozenset({"n_layers", "attention_bias", "fc_bias"}),
    "eagle3": frozenset({"layers"}),
}
CANNOT = {"rope_scaling": "the EAGLE project knows other words for scaled positions"}
MISSING = "EAGLE leaves it at random and says nothing"
UNKNOWN = "EAGLE drops it in silence"
NAMES_TARGET = False
TARGETS = ("llama", "qwen2", "qwen3", "mixtral")


def save(head: Head, folder: Path, about: ExportInfo) -> None:
    """Write config.json and model.safetensors; raises UserError for what EAGLE would drop or misread."""
    refuse(head, SERVER, CARRIES, CANNOT)
    if head.target.config.model_type not in TARGETS:
        known = ", ".join(TARGETS)
        raise UserError(f"target {head.target.name!r} is a {head.target.config.model_type}: EAGLE knows {known} alone")
    eagle_layout.needs_plain_embedding(head, SERVER)
    config = eagle_layout.llama_config(head, about)
    if head.kind == "eagle3":
        eagle_layout.needs_usual_layers(head, SERVER)
        config["draft_vocab_size"] = head.draft_size
    else:
        eagle_layout.needs_plain_output(head, SERVER)
        _needs_plain_eagle(head)
        config |= {"bias": head.config.fc_bias, "qkv_bias": head.config.attention_bias}
    write_json(folder / CONFIG, config)
    write_tensors(folder / WEIGHTS, eagle_layout.tensors(head, about.dtype))


def load(folder: Path, target: Target) -> ForeignHead:
    """What EAGLE would make of the folder; raises UserError where no head here is like it."""
    config = read_config(folder / CONFIG)
    tensors = read_tensors(folder, "pytorch_model.bin", WEIGHTS)  # in the order EAGLE looks for them
    tensors.pop("embed_tokens.weight", None)  # as EAGLE does
    if "draft_vocab_size" in config:
        return eagle_layout.served_eagle3(
            config, tensors, target, eagle_layout.usual_layers(target.n_layers), _no_norms(config)
        )
    c = eagle_layout.shape(config)
    if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
        raise UserError(f"head_dim is {c['head_dim']}: EAGLE takes hidden_size / num_attention_heads")
    if config.get("bias", True) != ("fc.bias" in tensors):
        raise UserError(f"bias is {config.get('bias', True)}, which does not fit whether there is fc.bias")
    return eagle_layout.served_eagle(config, tensors, bool(config.get("qkv_bias", False)))


def serve(head: Head, folder: str, about: ExportInfo) -> str:
    third = head.kind == "eagle3"
    return (
        'python -c "from eagle.model.ea_model import EaModel; '
        f"EaModel.from_pretrained(base_model_path='{about.target_id}', ea_model_path='{folder}', use_eagle3={third})\""
    )


def _no_norms(config: dict[str, Any]) -> dict[str, bool]:
    """EAGLE knows none of them; files that ask for one were made for something else."""
    norms = eagle_layout.flags_of(config)
    if asked := [name for name, on in norms.items() if on]:
        raise UserError(f"{', '.join(asked)} is set: EAGLE does not read it, and drafts without")
    return norms


def _needs_plain_eagle(head: Head) -> None:
    c = head.config
    if head.reduced:
        raise UserError(
            f"head option draft_vocab_size={head.draft_size}: EAGLE reads drafts from the target's whole output layer; "
            "nothing is written"
        )
    if c.head_dim * c.num_attention_heads != c.hidden_size:
        raise UserError(
            f"head option head_dim={c.head_dim}: EAGLE takes hidden_size / num_attention_heads = "
            f"{c.hidden_size / c.num_attention_heads:g} for such a head; nothing is written"
        )
