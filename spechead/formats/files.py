"""Folders that other programs read: written whole or not at all, and read with distrust.

Knows which files hold tensors and settings, but nothing of heads or servers.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spechead.errors import UserError
from spechead.files import make_folder, read_json, reason
from spechead.formats.gguf_file import read_gguf

CONFIG, WEIGHTS, RECORD, CARD = "config.json", "model.safetensors", "spechead.json", "README.md"
PICKLED = (".bin", ".pt", ".pth", ".pkl")
_PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # weights
_PLAIN |= {torch.bool, torch.int32, torch.int64}  # tables of tokens
_MOST_JSON = 32 << 20  # bytes; no configuration needs a tenth of it
_DEEPEST = 50  # levels of lists and objects
_SAFE = "ask for safetensors"
_ABSOLUTE = re.compile(r"^(?:/[^/\s]|~/|[A-Za-z]:[\\/])")


@contextmanager
def new_folder(out: Path, option: str = "out") -> Iterator[Path]:
    """A scratch folder that takes the name `out` once all is written; an earlier export of that name gives way.

    Raises UserError where `out`, which the `option` gave, is something else, or the disk refuses.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / RECORD).is_file())):
        raise UserError(f"option {option}: {out} exists and is no export of spechead; give another folder")
    make_folder(out.parent)
    scratch, old = (out.with_name(f".{out.name}.{secrets.token_hex(4)}.{end}") for end in ("tmp", "old"))
    try:
        scratch.mkdir()
        yield scratch
        if out.exists():
            out.rename(old)
        scratch.rename(out)
    except OSError as error:
        if old.exists() and not out.exists():
            old.rename(out)
        raise UserError(f"cannot write {out}: {reason(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises UserError where the disk refuses. Tensors that share memory are written each by itself."""
    try:
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(0o644)  # the library lets nobody else read it, and servers run as others
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError where it is none, or larger than a configuration can be."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    if size > _MOST_JSON:
        raise UserError(f"{path} has {size >> 20} MB: no configuration is as large, it is not read")
    try:
        value = read_json(path)
        deep = _deeper(value)
    except RecursionError:
        value, deep = None, True
    if deep:
        raise UserError(f"{path} is not valid JSON: nested too deeply")
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def _deeper(value: Any) -> bool:
    """Whether lists and objects lie in each other deeper than a configuration's."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _inside(outer)]
    return bool(level)


def _inside(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def read_tensors(folder: Path, *names: str) -> dict[str, Tensor]:
    """The tensors in the first of the files `names` that `folder` has, by default those of transformers' names.

    Raises UserError for quantised ones: their numbers mean nothing without scales.
    """
    names = names or (WEIGHTS, "pytorch_model.bin")
    for name in names:
        if (path := folder / name).is_file():
            tensors = _read(path)
            if odd := [f"{key} is {str(t.dtype)[6:]}" for key, t in sorted(tensors.items()) if t.dtype not in _PLAIN]:
                raise UserError(
                    f"{path} holds quantised tensors, and heads are read in full: {as_text(', '.join(odd))}"
                )
            return tensors
    raise UserError(f"{folder} holds none of {', '.join(names)}")


def read_file(path: Path) -> dict[str, Any]:
    """What is in a file, by name: a configuration's keys, a weight file's tensors, or both."""
    if path.suffix == ".gguf":
        both = read_gguf(path)
        return both.settings | both.tensors
    return read_config(path) if path.suffix == ".json" else _read(path)


def _read(path: Path) -> dict[str, Tensor]:
    return _read_pickled(path) if path.suffix in PICKLED else _read_safetensors(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or no safetensors file: {error}") from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """torch's own files, of which nothing but tensors is taken: no code in them runs."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except Exception as error:  # the bytes decide which; torch's own words advise to run the code
        raise UserError(f"{path} is damaged, or holds more than tensors, and is not read: {_SAFE}") from error
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise UserError(f"{path} holds more than named tensors, and is not read: {_SAFE}")
    return {str(name): tensor for name, tensor in value.items()}


def absolute_paths(value: Any, at: str = "") -> list[str]:
    """Where in a JSON value a text is a path of this machine."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in absolute_paths(inner, f"{at}.{key}" if at else key)]
    if isinstance(value, list):
        return [found for inner in value for found in absolute_paths(inner, at)]
    return [at] if isinstance(value, str) and _ABSOLUTE.match(value) else []


def as_text(value: Any) -> str:
    """A value as a reader of JSON writes it, cut to a line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
