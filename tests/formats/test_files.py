"""Files of others are read with distrust, and exports are written whole or not at all."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.errors import UserError
from spechead.formats.check import check_folder
from spechead.formats.export import write_export
from spechead.formats.files import absolute_paths, new_folder, read_config, read_weights
from spechead.formats.push import publishable
from spechead.formats.registry import read_head
from tests.helpers.exporting import export_info, make_head, tiny


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/spechead-test-pickle-ran",)


# ------------------------------------------------------------------------------------------------ reading


def test_a_truncated_file_is_one_line(exported: Path) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors: damaged or no safetensors file"):
        read_weights(exported)
    lines = list(check_folder(exported, tiny("llama")))
    assert not lines[-1].ok and "\n" not in lines[-1].text


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_does_not_run(name: str, exported: Path) -> None:
    (exported / "model.safetensors").unlink()
    (exported / name).write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(UserError, match="damaged"):
        read_weights(exported)
    torch.save({"fc.weight": Evil()}, exported / name)
    with pytest.raises(UserError, match="damaged") as error:
        read_weights(exported)
    assert "weights_only" not in str(error.value), "torch's advice runs the code"
    assert not Path("/tmp/spechead-test-pickle-ran").exists()


def test_a_pickle_beside_the_weights_fails_the_check(exported: Path) -> None:
    torch.save({}, exported / "pytorch_model.bin")
    failures = [str(line) for line in check_folder(exported, tiny("llama")) if not line.ok]
    assert failures[0].startswith("FAIL  files         pytorch_model.bin: pickled files can run code")


@pytest.mark.parametrize("text", ["[1]", "null", "{", "[" * 100000, "\xff"])
def test_what_is_no_configuration_is_one_line(text: str, exported: Path) -> None:
    (exported / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="config.json"):
        read_config(exported / "config.json")


@pytest.mark.parametrize("depth", [100, 480, 700, 900, 960, 2000, 100000])
def test_nesting_of_any_depth_is_at_most_one_line(depth: int, exported: Path) -> None:
    (exported / "config.json").write_text('{"a":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(UserError):
        read_head("vllm", exported, tiny("llama"))
    with pytest.raises(UserError):
        publishable(exported)
    assert not all(line.ok for line in check_folder(exported, tiny("llama"), make_head("eagle3", tiny("llama"))))
    if depth >= 2000:
        with pytest.raises(UserError, match="nested too deeply"):
            read_config(exported / "config.json")


# ------------------------------------------------------------------------------------------------ others' files


# ------------------------------------------------------------------------------------------------ writing


def test_absolute_paths_are_found_anywhere() -> None:
    value = {"a": "/home/me", "b": {"c": ["x", "~/y", "C:\\z"]}, "d": "org/model", "e": "/", "f": "a /b"}
    assert absolute_paths(value) == ["a", "b.c", "b.c"]


def test_an_export_replaces_an_export_alone(exported: Path, tmp_path: Path) -> None:
    target, info = tiny("llama"), export_info(tiny("llama"), tmp_path)
    write_export(make_head("medusa", target), "vllm", exported, info)
    assert "medusa" in (exported / "config.json").read_text()
    folder = tmp_path / "folder"
    folder.mkdir()
    write_export(make_head("medusa", target), "vllm", folder, info)  # an empty folder is nobody's
    (folder / "spechead.json").unlink()
    with pytest.raises(UserError, match="folder exists and is no export of spechead"):
        write_export(make_head("medusa", target), "vllm", folder, info)
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(UserError, match="file exists and is no export"):
        write_export(make_head("medusa", target), "vllm", file, info)
    assert file.read_text() == "kept"


def test_a_failure_leaves_the_export_before_it(exported: Path) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(RuntimeError, match="half way"), new_folder(exported) as scratch:
        (scratch / "config.json").write_text("{}")
        raise RuntimeError("half way")
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir() if path.name.startswith(".")] == []


def test_weights_that_share_memory_are_written_each(tmp_path: Path) -> None:
    from spechead.heads.files import write_tensors

    one = torch.arange(4.0)
    write_tensors(tmp_path / "x.safetensors", {"a": one, "b": one[:2], "c": one.view(2, 2).T})
    back = load_file(tmp_path / "x.safetensors")
    assert back["c"].tolist() == [[0, 2], [1, 3]] and back["b"].tolist() == [0, 1]
    save_file(back, tmp_path / "y.safetensors")
