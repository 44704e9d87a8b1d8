"""TensorRT-LLM: EAGLE-3 heads for its PyTorch backend, Medusa heads for `convert_checkpoint.py` of its older one.

From the code of TensorRT-LLM 1.1. The files do not name the tapped layers, and the embedding is always the target's.
"""

from __future__ import annotations

from pathlib import Path

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse_unsupported
from spechead.formats.files import CONFIG, read_config, read_weights, write_files
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.servers import medusa_project
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "TensorRT-LLM 1.1"
SUPPORTS = {
    "eagle3": frozenset({"layers", "rope_scaling", "norm_before_fc", "fc_norm", "norm_output"}),
    "medusa": frozenset({"n_heads", "n_layers"}),
}
REASONS = {
    "output": "TensorRT-LLM reads an output layer for each head",
    "norm_before_residual": "TensorRT-LLM ignores it",
}
IF_MISSING = "TensorRT-LLM stops at load, or uses the target's output layer for a missing lm_head"
IF_UNKNOWN = "TensorRT-LLM silently ignores it"
NAMES_TARGET = False
_FEWEST_LAYERS = 6  # of a target whose layers are tapped


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and tensors; raises UserError for what TensorRT-LLM would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    if head.kind == "medusa":
        medusa_project.write(head, folder, info, SERVER)
        return
    eagle_layout.require_default_taps(head, SERVER)
    eagle_layout.refuse_scaled_embedding(head, SERVER)
    if head.target.n_layers < _FEWEST_LAYERS:
        raise UserError(
            f"target {head.target.name!r} has {head.target.n_layers} layers: {SERVER} requires {_FEWEST_LAYERS}"
        )
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | eagle_layout.llama_config(head, info)
    config |= {"draft_vocab_size": head.draft_size, "bias": False} | eagle_layout.norms(head.config)
    config["eagle_config"] = {"norm_before_fc": head.config.norm_before_fc}  # where TensorRT-LLM reads this one
    write_files(folder, config, eagle_layout.tensors(head, info.dtype))


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as TensorRT-LLM does. Raises UserError if no head here is equivalent."""
    if (folder / medusa_project.WEIGHTS).is_file() or (folder / "medusa_lm_head.pt").is_file():
        return medusa_project.read(folder, target)
    config, tensors = read_config(folder / CONFIG), read_weights(folder)
    tensors.pop("embed_tokens.weight", None)  # as TensorRT-LLM does
    if not config.get("torch_dtype") and not config.get("dtype"):
        raise UserError("torch_dtype is missing: TensorRT-LLM builds the head in that dtype")
    if "attention_bias" not in config:
        raise UserError("attention_bias is missing: TensorRT-LLM stops at load")
    inner = config.get("eagle_config") or {}
    for name in ("eh_proj_before_attn", "return_hidden_post_norm"):
        if inner.get(name):
            raise UserError(f"{name} is set: eagle3 heads here draft otherwise")
    norms = eagle_layout.norms(config)
    if norms["norm_before_residual"]:
        raise UserError("norm_before_residual is set: TensorRT-LLM ignores it")
    if norms["norm_before_fc"] != bool(inner.get("norm_before_fc")):
        raise UserError("norm_before_fc differs inside eagle_config, where TensorRT-LLM reads it")
    return eagle_layout.read_eagle3(config, tensors, target, eagle_layout.default_taps(target.n_layers), norms)


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    if head.kind == "medusa":
        return (
            f"python examples/medusa/convert_checkpoint.py --model_dir {info.target_id} --medusa_model_dir {folder} "
            f"--num_medusa_heads {head.config.n_heads} --num_medusa_layers {head.config.n_layers} "
            "--output_dir converted"
        )
    settings = f"decoding_type: Eagle, max_draft_len: {max(head.depths, 3)}, speculative_model_dir: {folder}"
    return (
        f"echo 'speculative_config: {{{settings}}}' > speculative.yaml && "
        f"trtllm-serve {info.target_id} --extra_llm_api_options speculative.yaml"
    )
