"""Folders that other programs read: written whole or not at all, and read without trusting their contents."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.files import read_json, reason, replacing, write_json
from spechead.formats.gguf_file import read_gguf
from spechead.heads.files import read_tensors, write_tensors
from spechead.target.loading import dtype_name

CONFIG, WEIGHTS, MANIFEST, CARD = "config.json", "model.safetensors", "spechead.json", "README.md"
TEMPLATE = "chat_template.jinja"  # of a head that was trained with another one than the target's own
PICKLED = (".bin", ".pt", ".pth", ".pkl")
_PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # weights
_PLAIN |= {torch.bool, torch.int32, torch.int64}  # vocabulary tables
_REMEDY = "ask for safetensors"
_ABSOLUTE = re.compile(r"^(?:/[^/\s]|~/|[A-Za-z]:[\\/])")


@contextmanager
def new_folder(out: Path, option: str = "out") -> Iterator[Path]:
    """Yield a scratch folder that becomes `out` at the end, in place of an earlier export.

    Raises UserError if `out`, the value of `option`, is anything else, or cannot be written.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / MANIFEST).is_file())):
        raise UserError(f"option {option}: {out} exists and is no export of spechead; give another folder")
    with replacing(out) as scratch:
        scratch.mkdir()
        yield scratch


def write_files(folder: Path, settings: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    write_json(folder / CONFIG, settings)
    write_tensors(folder / WEIGHTS, tensors)


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError for anything else."""
    try:
        value = read_json(path)
        absolute_paths(value)  # reaches Python's recursion limit here, if at all, and not in a caller
    except RecursionError:
        raise UserError(f"{path} is not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is expected")
    return value


def read_weights(folder: Path, *names: str) -> dict[str, Tensor]:
    """The tensors in the first existing file of `names`, by default the names of transformers.

    Raises UserError for quantised tensors, which mean nothing without their scales.
    """
    names = names or (WEIGHTS, "pytorch_model.bin")
    for name in names:
        if (path := folder / name).is_file():
            tensors = read_file(path)
            if odd := [
                f"{key} is {dtype_name(t.dtype)}" for key, t in sorted(tensors.items()) if t.dtype not in _PLAIN
            ]:
                raise UserError(f"{path}: quantised tensors cannot be read: {shorten(', '.join(odd))}")
            return tensors
    raise UserError(f"{folder} has none of {', '.join(names)}")


def read_file(path: Path) -> dict[str, Any]:
    """The contents of a file by name: keys of a configuration, tensors, or both."""
    if path.suffix == ".gguf":
        both = read_gguf(path)
        return both.settings | both.tensors
    if path.suffix == ".json":
        return read_config(path)
    return _read_pickled(path) if path.suffix in PICKLED else read_tensors(path)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of torch.save. Code in it is never run."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except Exception as error:  # of any type, and torch's own message advises to run the code
        raise UserError(f"{path}: damaged, or not tensors alone; it is not read: {_REMEDY}") from error
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise UserError(f"{path}: not named tensors alone; it is not read: {_REMEDY}")
    return {str(name): tensor for name, tensor in value.items()}


def absolute_paths(value: Any, at: str = "") -> list[str]:
    """Dotted keys of a JSON value whose texts are absolute paths."""
    if isinstance(value, dict):
        return [path for key, inner in value.items() for path in absolute_paths(inner, f"{at}.{key}" if at else key)]
    if isinstance(value, list):
        return [path for inner in value for path in absolute_paths(inner, at)]
    return [at] if isinstance(value, str) and _ABSOLUTE.match(value) else []


def shorten(value: Any) -> str:
    """A value in at most one line of a message: text as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
