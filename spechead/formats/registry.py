"""The formats of other programs, by name, and what a format's module must define.

Each refuses by name everything of a head that its server would ignore or misread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo, Supports
from spechead.formats.files import CONFIG, MANIFEST, read_config, shorten
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.manifest import read_manifest
from spechead.formats.servers import eagle_project, llama_cpp, medusa_project, sglang, speculators, tgi, trtllm, vllm
from spechead.heads import Head
from spechead.target.model import Target


class Format(Protocol):
    """What the module of a format defines."""

    SERVER: str  # the program, and the version whose code defines the format
    SUPPORTS: Supports
    REASONS: dict[str, str]  # option of a head -> why it is not supported
    IF_MISSING: str  # what the server does if a tensor is missing
    IF_UNKNOWN: str  # what the server does with a tensor that it does not know
    NAMES_TARGET: bool  # whether the files name the target that is loaded with them

    def save(self, head: Head, folder: Path, info: ExportInfo) -> None:
        """Write the files into an existing folder. Raises UserError for what the server would ignore or misread."""

    def load(self, folder: Path, target: Target) -> ForeignHead:
        """Read the files as the server does. Raises UserError where it would stop, or no head here is equivalent."""

    def serve_command(self, head: Head, folder: str, info: ExportInfo) -> str:
        """The command that serves the head in `folder`."""


FORMATS: dict[str, Format] = {
    "vllm": vllm,
    "sglang": sglang,
    "eagle": eagle_project,
    "medusa": medusa_project,
    "speculators": speculators,
    "tgi": tgi,
    "trtllm": trtllm,
    "llama.cpp": llama_cpp,
}


WRONG_TYPE = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What code raises for values of an unexpected type, of which the files of others may be full."""


def format_of(name: str, option: str = "format") -> Format:
    """The format of that name, the value of `option`. Raises UserError if there is none."""
    if name not in FORMATS:
        raise UserError(f"option {option}: {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


def read_head(name: str, folder: Path, target: Target) -> tuple[ForeignHead, Head]:
    """Read the files as the server does, and build the equivalent head.

    Raises UserError if there is none, and for settings of an unexpected type.
    """
    try:
        foreign = format_of(name).load(folder, target)
        return foreign, foreign.head(target)
    except WRONG_TYPE as error:
        raise UserError(wrong_type(error, name)) from error


def wrong_type(error: Exception, name: str) -> str:
    """A line on one of WRONG_TYPE, for files of the format `name`."""
    cause = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return f"settings or tensors have another type than in {name} files ({cause})"


def detect(folder: Path) -> str:
    """The format of the files in `folder`, by their manifest or else by their names and settings."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    manifest = read_manifest(folder)
    if manifest is not None:
        if not isinstance(manifest["format"], str) or manifest["format"] not in FORMATS:
            raise UserError(f"{folder / MANIFEST}: format {shorten(manifest['format'])} is unknown to this version")
        return str(manifest["format"])
    names = {path.name for path in folder.iterdir()}
    if any(name.endswith(".gguf") for name in names):
        return "llama.cpp"
    if {"medusa_lm_head.safetensors", "medusa_lm_head.pt"} & names:
        return "medusa"
    config = read_config(folder / CONFIG)
    if "speculators_model_type" in config:
        return "speculators"
    if config.get("architectures") == ["LlamaForCausalLMEagle"]:
        return "sglang"
    if not config.get("architectures") and "bias" in config:
        return "eagle"
    return "vllm"
