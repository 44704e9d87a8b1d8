"""The manifest of an export, spechead.json: whose head it is, and every key and tensor that was written.

With it, a changed setting or a damaged tensor is later found by name without the original head.
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
from spechead.formats.files import CARD, MANIFEST, TEMPLATE, read_config, read_file, shorten
from spechead.heads import Head
from spechead.target.loading import dtype_name

_RECORDED = (".json", ".safetensors", ".gguf")
_HEX = 32  # digits of a digest
_PREFIX = "sha256:"
_LONGEST = 1000  # characters of a value that is stored as it is


def make_manifest(head: Head, to: str, info: ExportInfo, folder: Path) -> dict[str, Any]:
    """The manifest of the files in `folder` as they are now."""
    return {
        "exported_by": f"spechead {__version__}",
        "format": to,
        "kind": head.kind,
        "options": asdict(head.config),
        "target": {"name": info.target_id, "fingerprint": head.target.fingerprint},
        "dtype": dtype_name(info.dtype),
        "template": _template_digest(folder),
        "files": contents(folder),
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an export; None if there is none. Raises UserError if it is damaged."""
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_config(folder / MANIFEST)
    files, target = manifest.get("files"), manifest.get("target")
    sound = isinstance(files, dict) and all(isinstance(keys, dict) for keys in files.values())
    sound = sound and isinstance(target, dict) and {"name", "fingerprint"} <= target.keys()
    if not sound or "format" not in manifest:
        raise UserError(f"{folder / MANIFEST}: no manifest of an export; remove it to proceed without")
    return manifest


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """File -> key -> value: JSON values as they are, tensors as digests."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _RECORDED and path.name != MANIFEST)
    return {path.name: {key: _entry(value) for key, value in read_file(path).items()} for path in files}


def _template_digest(folder: Path) -> str:
    """A digest of the chat template that comes with the export; empty if none does."""
    path = folder / TEMPLATE
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_HEX] if path.is_file() else ""


def template_change(manifest: dict[str, Any], folder: Path) -> list[str]:
    """One line where the chat template is not the exported one."""
    recorded, found = manifest.get("template", ""), _template_digest(folder)
    if recorded == found:
        return []
    what = "was not exported" if not recorded else "is missing" if not found else "is another one than was exported"
    return [f"{TEMPLATE} {what}; prompts have another form than the head was trained on"]


def extra_files(manifest: dict[str, Any], folder: Path) -> list[str]:
    """Files in the folder of an export that do not belong to it."""
    return sorted({path.name for path in folder.iterdir()} - {*manifest["files"], MANIFEST, CARD, TEMPLATE})


def differences(
    expected: dict[str, dict[str, Any]],
    folder: Path,
    if_missing: str = "it was exported",
    if_extra: str = "it is not of the export",
) -> list[str]:
    """Where the files differ from the expected ones; `if_missing` and `if_extra` comment on tensors."""
    current, lines = contents(folder), []
    for name in sorted(expected.keys() | current.keys()):
        if name not in current:
            lines.append(f"file {name} is missing")
        elif name not in expected:
            lines.append(f"file {name} was not exported")
        else:
            lines += [f"{name}: {line}" for line in _changes(expected[name], current[name], if_missing, if_extra)]
    return lines


def _changes(old: dict[str, Any], new: dict[str, Any], if_missing: str, if_extra: str) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            yield f"{key} is missing" + (f"; {if_missing}" if _is_digest(old[key]) else "")
        elif key not in old:
            yield f"{key} was not exported" + (f"; {if_extra}" if _is_digest(new[key]) else f" ({shorten(new[key])})")
        elif old[key] != new[key] and _is_digest(old[key]):
            yield f"{key} has other values; the server drafts with another head"
        elif old[key] != new[key]:
            yield f"{key} is {shorten(new[key])}, exported {shorten(old[key])}; the server takes it for another head"


def _entry(value: Any) -> Any:
    """Short values as they are, tensors and long values as digests."""
    if isinstance(value, Tensor):
        return _PREFIX + digest(value)
    text = json.dumps(value, default=str)
    return value if len(text) <= _LONGEST else _PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_HEX]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_PREFIX)


def digest(tensor: Tensor) -> str:
    """A digest of dtype, shape and every bit."""
    total = hashlib.sha256(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
    total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:_HEX]
