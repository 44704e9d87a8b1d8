"""The manifest of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spechead.formats.check import check_folder
from spechead.formats.files import TEMPLATE
from spechead.formats.manifest import read_manifest, template_change
from tests.helpers.exporting import tiny


@pytest.mark.parametrize("key, value", [("files", []), ("files", {"config.json": 1}), ("target", None), ("target", {})])
def test_a_damaged_manifest_is_one_line(key: str, value: Any, exported: Path) -> None:
    record = json.loads((exported / "spechead.json").read_text()) | {key: value}
    (exported / "spechead.json").write_text(json.dumps(record))
    lines = list(check_folder(exported, tiny("llama")))
    assert [line.ok for line in lines] == [False] and "no manifest of an export" in lines[0].text


def test_a_chat_template_of_the_export_is_watched_like_its_tensors(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest is not None and manifest["template"] == "" and template_change(manifest, exported) == []
    (exported / TEMPLATE).write_text("{{ messages }}")
    assert template_change(manifest, exported)[0].startswith(
        "chat_template.jinja was not exported; prompts have another"
    )
    known = manifest | {"template": "0" * 32}
    assert "is another one than was exported" in template_change(known, exported)[0]
    assert [line.text for line in check_folder(exported, tiny("llama")) if not line.ok and TEMPLATE in line.text]
    (exported / TEMPLATE).unlink()
    assert "is missing" in template_change(known, exported)[0]
