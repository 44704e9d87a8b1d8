"""What is uploaded, and what is not. Nothing here opens a connection."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spechead.errors import UserError
from spechead.formats.push import PushOptions, push


class Hub:
    """Stands for huggingface_hub's HfApi."""

    calls: list[tuple[str, Any]] = []
    there: bool | None = None  # whether a repository that exists is private

    def repo_info(self, repo: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.there if self.there is not None else self.calls[-1][1])

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append((repo, private))

    def upload_folder(self, *, folder_path: Path, repo_id: str, allow_patterns: list[str]) -> None:
        self.calls.append((repo_id, allow_patterns))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    Hub.calls = []
    return Hub.calls


def test_a_dry_run_lists_the_files(exported: Path, hub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    push(PushOptions(str(exported), "org/name", dry_run=True))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("README.md", "config.json", "model.safetensors", "spechead.json"))
    assert "would upload 4 files" in shown and "to org/name (private)" in shown
    assert hub == []


def test_repositories_are_private_by_default(exported: Path, hub: list[Any]) -> None:
    push(PushOptions(str(exported), "org/name"))
    push(PushOptions(str(exported), "org/name", private=False))
    names = ["README.md", "config.json", "model.safetensors", "spechead.json"]
    assert hub == [("org/name", True), ("org/name", names), ("org/name", False), ("org/name", names)]


def test_what_is_no_sound_export_is_not_uploaded(exported: Path, hub: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not of the form org/name"):
        PushOptions(str(exported), "name")
    with pytest.raises(UserError, match="no folder"):
        push(PushOptions(str(tmp_path / "none"), "org/name"))
    torch.save({}, exported / "old.pt")
    with pytest.raises(UserError, match="contains old.pt"):
        push(PushOptions(str(exported), "org/name"))
    (exported / "old.pt").unlink()
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"norm_output": True}))
    with pytest.raises(UserError, match="config.json: norm_output is true, exported false"):
        push(PushOptions(str(exported), "org/name"))
    (exported / "spechead.json").unlink()
    with pytest.raises(UserError, match="is no export of spechead"):
        push(PushOptions(str(exported), "org/name"))
    assert hub == []


@pytest.mark.parametrize(
    "there, message", [(False, "is public: give --no-private"), (True, "is private: give --private")]
)
def test_a_repository_of_another_visibility_is_left_alone(
    there: bool, message: str, exported: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "there", there)
    with pytest.raises(UserError, match=message):
        push(PushOptions(str(exported), "org/name", private=not there))
    assert hub == [("org/name", not there)], "nothing is uploaded"


@pytest.mark.parametrize("name", [".env", "train.log", "notes.json", "other.safetensors"])
def test_nothing_but_the_export_is_uploaded(name: str, exported: Path, hub: list[Any]) -> None:
    (exported / name).write_text("{}")
    for dry_run in (True, False):
        with pytest.raises(UserError, match=f"contains {name}: not of the export"):
            push(PushOptions(str(exported), "org/name", dry_run=dry_run))
    assert hub == []
