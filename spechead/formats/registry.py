"""The formats of other programs, and what each says of itself.

A format is a module. It refuses by name whatever of a head its server would drop or misread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from spechead.errors import UserError
from spechead.formats.capabilities import Carries, ExportInfo
from spechead.formats.files import CONFIG, as_text, read_config
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.manifest import read_manifest
from spechead.formats.servers import eagle_project, llama_cpp, medusa_project, sglang, speculators, tgi, trtllm, vllm
from spechead.heads import Head
from spechead.target.model import Target


class Format(Protocol):
    """What a module of a format holds."""

    @property
    def SERVER(self) -> str:
        """The program, with the version that the format was read off."""

    @property
    def CARRIES(self) -> Carries: ...

    @property
    def CANNOT(self) -> Mapping[str, str]:
        """Option of a head -> why it is refused."""

    @property
    def MISSING(self) -> str:
        """What the server does where a tensor is missing."""

    @property
    def UNKNOWN(self) -> str:
        """And where one is there that it does not know."""

    @property
    def NAMES_TARGET(self) -> bool:
        """Whether the files name the target that is loaded with them."""

    def save(self, head: Head, folder: Path, about: ExportInfo) -> None:
        """Write the files into an existing folder. Raises UserError for what the server would drop or misread."""

    def load(self, folder: Path, target: Target) -> ForeignHead:
        """What the server would make of the files. Raises UserError where it would stop, or no head here is like it."""

    def serve(self, head: Head, folder: str, about: ExportInfo) -> str:
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


WRONG_KIND = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What code raises at a value of a kind that it does not expect. The values of others' files have any kind."""


def format_of(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


def read_head(name: str, folder: Path, target: Target) -> tuple[ForeignHead, Head]:
    """What the server would make of the files, and the head that is like it.

    Raises UserError where there is none, also for settings of the wrong kind.
    """
    try:
        served = format_of(name).load(folder, target)
        return served, served.head(target)
    except WRONG_KIND as error:
        raise UserError(wrong_kind(error, name)) from error


def wrong_kind(error: Exception, name: str) -> str:
    """A line on one of WRONG_KIND, for files of the format `name`."""
    what = as_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return f"settings or tensors are not of the kind that {name} files have ({what})"


def detect(folder: Path) -> str:
    """Whose form the files in `folder` have: what the record says, else what they look like."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    record = read_manifest(folder)
    if record is not None:
        return str(record["format"])
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
