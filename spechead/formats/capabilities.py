"""Which heads and options a format supports. Options that it does not list are refused, whichever head has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from spechead.errors import UserError
from spechead.heads import Head
from spechead.heads.base import Role, options_with

Supports = dict[str, frozenset[str]]
"""Kind of head -> the options that the format can express, apart from sizes. Those of training need no support."""


@dataclass(frozen=True)
class ExportInfo:
    """What an export states besides the head itself."""

    target_id: str  # the server's name for the target
    dtype: torch.dtype = torch.float32  # of the written floats
    tokens_from: Path | None = None  # GGUF file of the target, whose tokenizer a GGUF head repeats


def refuse_unsupported(head: Head, server: str, supports: Supports, reasons: Mapping[str, str]) -> None:
    """Raise UserError for a head that the server cannot represent, or for the first such option.

    `reasons`: option -> why the server does not support it.
    """
    if head.kind not in supports:
        known = ", ".join(sorted(supports))
        raise UserError(f"{server} supports no {head.kind} heads in this format (it supports: {known})")
    refuse_adapter(head.target.adapter, server)
    supported = {*supports[head.kind], *options_with(type(head.config), Role.SIZE, Role.TRAINING)}
    for field in fields(head.config):
        value = getattr(head.config, field.name)
        if field.name not in supported and value != _default(field):
            why = reasons.get(field.name, f"the export to {server} does not know this option")
            raise cannot_export(field.name, value, why)


def cannot_export(option: str, value: Any, why: str) -> UserError:
    """The error for a head whose option a server cannot represent."""
    return UserError(f"option head.options.{option}: {value} cannot be exported: {why}")


def refuse_reduced(head: Head, why: str) -> None:
    """Raise UserError for a head with a reduced draft vocabulary."""
    if head.reduced:
        raise cannot_export("draft_vocab_size", head.draft_size, why)


def refuse_adapter(adapter: str, server: str) -> None:
    """Raise UserError for a head whose target has an adapter; "" is none."""
    if adapter:
        raise UserError(
            f"the head was trained for a target with the adapter {adapter!r}, and {server} loads the plain target: "
            "export with --merged-target FOLDER, which writes the target with the adapter merged, and check with "
            "--target FOLDER --force"
        )


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
