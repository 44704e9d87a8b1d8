"""Heads in the forms of other programs, for the tests: what is exported, from which targets, and what each carries."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch

from spechead.cli.main import main
from spechead.formats.capabilities import ExportInfo
from spechead.heads import HEADS, Head
from spechead.target.model import Target
from tests.helpers.targets import make_target

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HEADS_TO_EXPORT: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": 40}),
    "eagle3-all-tokens": ("eagle3", {"draft_vocab_size": 0}),
    "eagle3-two-taps": ("eagle3", {"draft_vocab_size": 40, "layers": [1, 3]}),
    "eagle3-other-taps": ("eagle3", {"draft_vocab_size": 40, "layers": [1, 3, 6]}),
    "eagle3-layers": ("eagle3", {"draft_vocab_size": 40, "n_layers": 3}),
    "eagle3-residual": ("eagle3", {"draft_vocab_size": 40, "norm_before_residual": True}),
    "eagle3-fusion": ("eagle3", {"draft_vocab_size": 40, "norm_before_fc": True}),
    "eagle3-1": ("eagle3", {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True}),
    "eagle3-scaled": ("eagle3", {"draft_vocab_size": 40, "rope_theta": 5e3, "rope_scaling": LLAMA3}),
    "eagle": ("eagle", {"attention_bias": False}),
    "eagle-layers": ("eagle", {"attention_bias": True, "n_layers": 2}),
    "eagle-bias": ("eagle", {"attention_bias": False, "fc_bias": True}),
    "medusa": ("medusa", {"n_heads": 5}),
    "medusa-three": ("medusa", {"n_heads": 3}),
    "medusa-blocks": ("medusa", {"n_heads": 2, "n_layers": 2}),
    "medusa-shared": ("medusa", {"n_heads": 2, "output": "shared"}),
    "medusa-shared-reduced": ("medusa", {"n_heads": 2, "output": "shared", "draft_vocab_size": 30}),
    "medusa-reduced": ("medusa", {"n_heads": 2, "draft_vocab_size": 30}),
    "hydra": ("hydra", {"n_heads": 2}),
}
_THIRD = {"eagle3", "eagle3-all-tokens"}
_TAPS = {"eagle3-two-taps", "eagle3-other-taps"}
_NOT_IN_VLLM = {"eagle-bias", "medusa-reduced", "medusa-shared-reduced", "hydra"}
SUPPORTED: dict[str, set[str]] = {
    "vllm": {name for name in HEADS_TO_EXPORT if name not in _NOT_IN_VLLM},
    "sglang": {name for name in HEADS_TO_EXPORT if name.startswith("eagle") and name != "eagle3-residual"},
    "eagle": _THIRD | {"eagle", "eagle-layers", "eagle-bias"},
    "medusa": {"medusa"},
    "speculators": {name for name in HEADS_TO_EXPORT if name.startswith("eagle3")},
    "tgi": {"medusa", "medusa-three", "medusa-blocks"},
    "trtllm": _THIRD | {"eagle3-fusion", "eagle3-1", "eagle3-scaled", "medusa", "medusa-three", "medusa-blocks"},
    "llama.cpp": _THIRD | {"eagle3-other-taps", "eagle3-residual"},
}
FAMILIES = ("llama", "llama-tied-one-kv-head", "qwen2", "qwen3-wide-heads", "gemma3")


@cache
def tiny(family: str) -> Target:
    return make_target(family)


def make_head(name: str, target: Target) -> Head:
    """Random weights of a size that any two tensors mixed up show."""
    kind, options = HEADS_TO_EXPORT[name]
    torch.manual_seed(1)
    head = HEADS[kind](HEADS[kind].Config(**options), target)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size) * 2 + 1)
    return head.eval().requires_grad_(False)


def export_info(target: Target, folder: Path, dtype: torch.dtype = torch.float32) -> ExportInfo:
    return ExportInfo("org/model", dtype, write_tokenizer(target, folder / "target.gguf"))


def write_tokenizer(target: Target, path: Path) -> Path:
    """A GGUF file with the toy tokenizer, as a target's own would hold it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    tokens = target.tokenizer.convert_ids_to_tokens(range(len(target.tokenizer)))
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * len(tokens))
    writer.add_array("tokenizer.ggml.merges", ["a b"])  # llama.cpp opens no file without
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(command: str) -> None:
    main(shlex.split(command))
