"""GGUF files: named settings and tensors in one file, as llama.cpp reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError

_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # llama.cpp's numbers for "mostly"


@dataclass
class Gguf:
    """The contents of a file. `kinds`: the library's numbers of a setting's type, and of the type of its elements."""

    settings: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def read_gguf(path: Path, settings_only: bool = False) -> Gguf:
    """Read a file. Raises UserError if it is damaged, or has quantised tensors that are not left out."""
    from gguf import GGUFReader, GGUFValueType

    if not path.is_file():
        raise UserError(f"no GGUF file {path}")
    contents = Gguf()
    try:
        reader = GGUFReader(path)
        for name, entry in reader.fields.items():
            if name.startswith("GGUF."):  # about the file itself
                continue
            inner = int(entry.types[-1]) if entry.types[0] == GGUFValueType.ARRAY else None
            contents.settings[name], contents.kinds[name] = entry.contents(), (int(entry.types[0]), inner)
        if not settings_only:
            contents.tensors = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OSError, RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged or no GGUF file: {error}") from error
    return contents


def _tensor(entry: Any) -> Tensor:
    """Convert a tensor of the library. Raises ValueError if it is quantised."""
    from gguf import GGMLQuantizationType as Kind

    data = torch.from_numpy(entry.data.copy())
    if entry.tensor_type == Kind.BF16:
        data = data.view(torch.uint8).view(torch.bfloat16)
    elif entry.tensor_type not in (Kind.F32, Kind.F16, Kind.I64):
        raise ValueError(f"{entry.name} is quantised ({entry.tensor_type.name}), and cannot be read")
    return data.reshape([int(size) for size in reversed(entry.shape)])


def write_gguf(
    path: Path, architecture: str, settings: dict[str, Any], copied: Gguf, tensors: dict[str, Tensor]
) -> None:
    """Write a file: `settings` under the architecture's name, those of `copied` unchanged, and the tensors.

    Values of `settings` are str, bool, int (written unsigned), float or lists of int.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, architecture)
    try:
        for name, value in settings.items():
            key = name if name.startswith("general.") else f"{architecture}.{name}"
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, value in copied.settings.items():
            kind, inner = copied.kinds[name]
            element = None if inner is None else GGUFValueType(inner)
            writer.add_key_value(name, value, GGUFValueType(kind), element)
        for name, tensor in tensors.items():
            flat = tensor.detach().cpu().contiguous()
            if flat.dtype == torch.bfloat16:
                writer.add_tensor(name, flat.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(name, flat.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def file_type(dtype: torch.dtype) -> int:
    return _FILE_TYPES[dtype]
