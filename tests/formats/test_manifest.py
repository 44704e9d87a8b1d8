"""The manifest of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spechead.formats.check import check_folder
from tests.helpers.exporting import tiny


@pytest.mark.parametrize("key, value", [("files", []), ("files", {"config.json": 1}), ("target", None), ("target", {})])
def test_a_damaged_manifest_is_one_line(key: str, value: Any, exported: Path) -> None:
    record = json.loads((exported / "spechead.json").read_text()) | {key: value}
    (exported / "spechead.json").write_text(json.dumps(record))
    lines = list(check_folder(exported, tiny("llama")))
    assert [line.ok for line in lines] == [False] and "no manifest of an export" in lines[0].text
