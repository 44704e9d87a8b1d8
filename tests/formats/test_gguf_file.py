"""Damaged GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from spechead.errors import UserError
from spechead.formats.export import write_export
from spechead.formats.gguf_file import read_gguf
from tests.helpers.exporting import export_info, make_head, tiny


def test_a_truncated_gguf_file_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_export(make_head("eagle3", tiny("llama")), "llama.cpp", out, export_info(tiny("llama"), tmp_path))
    path = out / "model.gguf"
    whole = path.read_bytes()
    for length in (2, 100, 5000, len(whole) - 500):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="model.gguf: damaged or no GGUF file"):
            read_gguf(path)
