"""The EAGLE project: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

from pathlib import Path

from tests.formats.servers.expected import DRAFT, EAGLE3, export, shapes


def test_eagle_project(tmp_path: Path) -> None:
    config, tensors, _ = export("eagle", "eagle3", tmp_path / "a")
    assert shapes(tensors) == EAGLE3 and config["draft_vocab_size"] == DRAFT
    config, tensors, _ = export("eagle", "eagle-bias", tmp_path / "b")
    assert config["bias"] is True and config["qkv_bias"] is False and "fc.bias" in tensors
    config, tensors, _ = export("eagle", "eagle-layers", tmp_path / "c")
    assert config["bias"] is False and config["qkv_bias"] is True and "fc.bias" not in tensors
