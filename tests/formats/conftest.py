"""Fixtures of the formats' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from spechead.formats.export import write_export
from spechead.heads.files import save_head
from spechead.target.model import Target
from tests.helpers.exporting import export_info, make_head, tiny, write_tokenizer
from tests.helpers.targets import make_target
from tests.helpers.training import write_tiny


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved target, and a head for it in each of three kinds."""
    root = write_tiny(tmp_path_factory.mktemp("run"))
    target = Target.load(str(root / "target"), device="cpu", pack=False)
    write_tokenizer(target, root / "target.gguf")
    for name in ("eagle3", "eagle", "medusa"):
        save_head(make_head(name, target), root / name, {"data": [str(root / "data.jsonl")], "steps": 3})
    return root


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, with other weights."""
    folder, target = tmp_path_factory.mktemp("other target"), make_target(seed=1)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    write_export(make_head("eagle3", tiny("llama")), "vllm", out, export_info(tiny("llama"), tmp_path))
    return out
