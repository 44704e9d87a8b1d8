"""What of a head a format carries. An option that a format does not know is refused, whoever added it.

Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from spechead.errors import UserError
from spechead.heads import Head

Carries = Mapping[str, frozenset[str]]
"""Kind of head -> its options that the format can say. All may differ in what SHAPE and TRAINING hold."""

SHAPE = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
SHAPE |= {"rms_norm_eps", "rope_theta", "draft_vocab_size"}
TRAINING = {
    "eagle": {"feature_weight", "logit_weight", "topk_weight", "topk", "noise", "steps", "step_decay", "detach_steps"},
    "eagle3": {"steps", "step_decay", "step_weights", "loss"},
    "medusa": {"decay"},
}
"""Options that only training reads: an export is right without them."""


@dataclass(frozen=True)
class ExportInfo:
    """What an export says beside the head itself."""

    target_id: str  # by which the server knows the target
    dtype: torch.dtype = torch.float32  # of the written floats
    tokens_from: Path | None = None  # GGUF file of the target, whose tokenizer a GGUF head repeats


def refuse(head: Head, server: str, carries: Carries, cannot: Mapping[str, str]) -> None:
    """Raise UserError for a head, or the first of its options, that the server has no words for.

    `cannot` explains options that are known not to work.
    """
    if head.kind not in carries:
        known = ", ".join(sorted(carries))
        raise UserError(f"{server} has no {head.kind} heads in this format (it has: {known}); nothing is written")
    refuse_adapter(getattr(head.target, "adapter", ""), server)
    said = carries[head.kind] | SHAPE | TRAINING.get(head.kind, set())
    for field in fields(head.config):
        value = getattr(head.config, field.name)
        if field.name not in said and value != _default(field):
            why = cannot.get(field.name, f"the export to {server} does not know this option")
            raise UserError(f"head option {field.name}={value}: {why}; nothing is written")


def refuse_adapter(adapter: str, server: str) -> None:
    """Raise UserError for a head whose target carries an adapter; "" is none."""
    if adapter:
        raise UserError(
            f"the head was trained for a target with the adapter {adapter!r}, and {server} loads the plain target: "
            "export with --merged-target FOLDER, which the target with the adapter merged is written to, and check "
            "with --target FOLDER --force"
        )


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()
