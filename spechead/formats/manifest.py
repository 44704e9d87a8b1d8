"""What an export remembers of itself: every key and tensor that it wrote, and whose head it is.

So that a flag flipped or a tensor damaged later is found by name, without the head at hand. Knows nothing of servers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead import __version__
from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo
from spechead.formats.files import CARD, RECORD, as_text, read_config, read_file
from spechead.heads import Head

_READ = (".json", ".safetensors", ".gguf")
_HEX = 32  # digits of a digest
_MARK = "sha256:"
_SHORT = 1000  # letters of a value that is kept as it is


def make_manifest(head: Head, to: str, about: ExportInfo, folder: Path) -> dict[str, Any]:
    """Of the files in `folder` as they are now."""
    return {
        "exported_by": f"spechead {__version__}",
        "format": to,
        "kind": head.kind,
        "options": asdict(head.config),
        "target": {"name": about.target_id, "fingerprint": head.target.fingerprint},
        "dtype": str(about.dtype).removeprefix("torch."),
        "files": contents(folder),
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The record in an export; None where there is none. UserError where it is damaged."""
    if not (folder / RECORD).is_file():
        return None
    record = read_config(folder / RECORD)
    files, target = record.get("files"), record.get("target")
    sound = isinstance(files, dict) and all(isinstance(keys, dict) for keys in files.values())
    if (
        not sound
        or not isinstance(target, dict)
        or not {"name", "fingerprint"} <= target.keys()
        or "format" not in record
    ):
        raise UserError(f"{folder / RECORD} is no record of an export; remove it to go on without")
    return record


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """File -> key -> what stands there: JSON values as they are, tensors as digests."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _READ and path.name != RECORD)
    return {path.name: {key: _entry(value) for key, value in read_file(path).items()} for path in files}


def beside(record: dict[str, Any], folder: Path) -> list[str]:
    """What lies in the folder of an export and is none of its files."""
    return sorted({path.name for path in folder.iterdir()} - {*record["files"], RECORD, CARD})


def differences(wanted: dict[str, dict[str, Any]], folder: Path, missing: str, unknown: str) -> list[str]:
    """Where the files differ from those wanted; `missing` and `unknown` say what a tensor less or more does."""
    found, lines = contents(folder), []
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            lines.append(f"file {name} is missing")
        elif name not in wanted:
            lines.append(f"file {name} was not exported")
        else:
            lines += [f"{name}: {line}" for line in _changes(wanted[name], found[name], missing, unknown)]
    return lines


def _changes(old: dict[str, Any], new: dict[str, Any], missing: str, unknown: str) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            yield f"{key} is missing" + (f"; {missing}" if _is_digest(old[key]) else "")
        elif key not in old:
            yield f"{key} was not exported" + (f"; {unknown}" if _is_digest(new[key]) else f" ({as_text(new[key])})")
        elif old[key] != new[key] and _is_digest(old[key]):
            yield f"{key} has other values; the server drafts with another head"
        elif old[key] != new[key]:
            yield f"{key} is {as_text(new[key])}, exported {as_text(old[key])}; the server takes it for another head"


def _entry(value: Any) -> Any:
    """Short values as they are, tensors and long ones as digests."""
    if isinstance(value, Tensor):
        return _MARK + digest(value)
    text = json.dumps(value, default=str)
    return value if len(text) <= _SHORT else _MARK + hashlib.sha256(text.encode()).hexdigest()[:_HEX]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_MARK)


def digest(tensor: Tensor) -> str:
    """Of dtype, shape and every bit."""
    found = hashlib.sha256(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:_HEX]
