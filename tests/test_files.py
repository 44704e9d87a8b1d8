"""Files are written whole or not at all, and every failure names its path."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

from spechead import files
from spechead.errors import UserError


def test_write_text_makes_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    files.write_text(path, "ä\n")
    files.write_text(path, "é\r\n")
    assert path.read_bytes() == "é\r\n".encode()
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "permission denied")])
def test_a_failed_write_names_the_path_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    path = tmp_path / "report.json"
    files.write_text(path, "old")

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=f"cannot write .*report.json: {words}"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_others_may_read_what_was_written_as_the_umask_says(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "folder") as scratch:
        (scratch / "sub").mkdir(parents=True)
        (scratch / "sub" / "weights").write_bytes(b"x")
        (scratch / "sub" / "weights").chmod(0o600)  # as safetensors makes them
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "folder" / "sub" / "weights").stat().st_mode & 0o777 == 0o666 & ~before
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the folder .*file/sub: a part of the path is a file"):
        files.write_text(tmp_path / "file" / "sub" / "x", "")
    with pytest.raises(UserError, match=r"cannot make the folder .*file: a file of that name is in the way"):
        files.make_folder(tmp_path / "file")


def test_a_folder_in_the_way_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        files.write_text(tmp_path, "x")
    assert list(tmp_path.parent.glob(".*.tmp")) == []


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot write .*pipe: it is a device or a pipe"):
        files.write_text(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()


def test_json_round_trip_and_no_nan(tmp_path: Path) -> None:
    value = {"α": [1, 2.5, None, True]}
    files.write_json(tmp_path / "x.json", value)
    assert files.read_json(tmp_path / "x.json") == value
    with pytest.raises(ValueError, match="Out of range float"):
        files.write_json(tmp_path / "y.json", {"a": float("nan")})
    assert not (tmp_path / "y.json").exists()


def test_unreadable_json_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone.json: no such file"):
        files.read_json(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text('{"a": 1')
    with pytest.raises(UserError, match=r"bad.json is not valid JSON: .*line 1"):
        files.read_json(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary.json is not valid JSON"):
        files.read_json(tmp_path / "binary.json")


def test_lines_of_json_come_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n')
    assert list(files.read_jsonl(path, "rows")) == [(f"{path} line 1", {"a": 1}), (f"{path} line 3", [2])]
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(UserError, match=r"x\.jsonl line 2: not valid JSON"):
        list(files.read_jsonl(path, "rows"))
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"x\.jsonl line 1: not valid JSON: .*recursion"):
        list(files.read_jsonl(path, "rows"))
    with pytest.raises(UserError, match=r"cannot read the rows .*gone: no such file"):
        list(files.read_jsonl(tmp_path / "gone", "rows"))
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"the rows .*x\.jsonl are not UTF-8 text"):
        list(files.read_jsonl(path, "rows"))


def test_lone_surrogates_are_replaced_and_nothing_else() -> None:
    assert files.clean("a\ud83d\udfff\U0001f600\0\ufeffä") == "a\ufffd\ufffd\U0001f600\0\ufeffä"


def test_a_folder_is_replaced_as_a_whole_or_stays(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for name in ("one", "two"):
        with files.replacing(folder) as scratch:
            scratch.mkdir()
            (scratch / name).write_text(name)
    assert [path.name for path in folder.iterdir()] == ["two"]
    with pytest.raises(ZeroDivisionError), files.replacing(folder) as scratch:
        scratch.mkdir()
        1 / 0  # noqa: B018
    assert [path.name for path in folder.iterdir()] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing is left beside it"


def test_a_run_is_resumed_with_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "settings.json"
    settings = {"seed": 0, "optim": {"lr": 0.1, "betas": (0.9, 0.95)}, "out": "x"}
    files.claim(path, settings, remedy="")
    files.claim(path, settings | {"out": "y"}, free=["out"], remedy="")
    with pytest.raises(UserError, match=r"run was begun with optim\.lr = 0\.1, now 0\.2: choose another folder"):
        files.claim(path, settings | {"optim": {"lr": 0.2, "betas": (0.9, 0.95)}}, remedy="choose another folder")
    files.claim(path, settings | {"optim": {"lr": 0.3, "betas": (0.9, 0.95)}}, free=["out", "optim."], remedy="")
    assert files.difference({"a": 1}, {"a": 1, "b": {"c": 2}}) == ("b.c", None, 2)


def test_a_block_waits_for_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "made" / "x.lock"
    code = f"""
import sys, time
from pathlib import Path
from threading import Timer
from spechead.files import exclusively
with exclusively(Path({str(lock)!r}), "busy"):
    print("in", flush=True)
    sys.stdin.readline()
    print("out", flush=True)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == "in\n"
        Timer(1.2, other.stdin.write, ["\n"]).start()
        Timer(1.3, other.stdin.flush).start()
        with files.exclusively(lock, "another process prepares it"):
            assert other.stdout.readline() == "out\n"
    assert capsys.readouterr().err == "another process prepares it: waiting for it\n"
    with files.exclusively(lock, "free"):
        pass
    assert capsys.readouterr().err == ""


def test_a_folder_is_locked_for_one_process(tmp_path: Path) -> None:
    with files.locked(tmp_path, "out"):
        code = (
            f"import pathlib, spechead.files\nwith spechead.files.locked(pathlib.Path({str(tmp_path)!r}), 'out'): pass"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "option out: another process writes to" in done.stderr
    with files.locked(tmp_path, "out"):
        pass


@pytest.mark.parametrize("name", ["recipes/eagle3-smollm2.yaml", "eval/prompts/held_out.jsonl", "data/sample.jsonl"])
def test_shipped_files_are_found(name: str) -> None:
    assert files.shipped(name).is_file()


def test_the_installed_copy_comes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "spechead"
    for root in (package / "share", tmp_path):
        (root / "data").mkdir(parents=True)
        (root / "data" / "sample.jsonl").write_text(json.dumps(str(root)))
    monkeypatch.setattr(files, "PACKAGE", package)
    assert files.shipped("data/sample.jsonl") == package / "share" / "data" / "sample.jsonl"
    (package / "share" / "data" / "sample.jsonl").unlink()
    assert files.shipped("data/sample.jsonl") == tmp_path / "data" / "sample.jsonl"
    with pytest.raises(UserError, match="ships no file named data/other.jsonl"):
        files.shipped("data/other.jsonl")


def test_an_interruption_between_the_renames_keeps_the_earlier_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "old").touch()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "head") as scratch:
        scratch.mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["head", "old"]


def test_what_the_system_does_not_let_go_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files.remove(tmp_path / "file" / "inside")  # no such path can be
    files.remove(tmp_path / ("a" * 300))
    assert (tmp_path / "file").is_file()
