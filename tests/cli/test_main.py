"""The command line: the table, one-line errors, exit codes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spechead.cli import main
from spechead.data.inspect import InspectOptions
from spechead.errors import UserError
from spechead.formats.export import ExportOptions


def ends(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = 0
    try:
        main.main(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a command into the table that fails with `error`."""

    def fails(name: str, argv: list[str]) -> None:
        raise error

    monkeypatch.setitem(main.COMMANDS, "fails", main.COMMANDS["summary"])
    monkeypatch.setattr(main, "run", fails)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_table_of_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ends(argv, capsys)
    assert code == 0
    for name in (
        "train",
        "eval",
        "generate",
        "data synthesize",
        "data regenerate",
        "data inspect",
        "extract-head",
        "search-layers",
        "summary",
    ):
        assert f"\n  {name} " in out


def test_a_group_shows_its_own_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ends(["data", "--help"], capsys)
    assert (code, "data inspect" in out, "export" in out) == (0, True, False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["--version"], capsys)[:2] == (0, f"spechead {main.__version__}\n")


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ends([*name.split(), "--help"], capsys)
    assert code == 0
    assert f"usage: spechead {name}" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command trian (did you mean train?)"),
        (["data", "inspct"], "unknown command data inspct (did you mean data inspect?)"),
        (["xyzzy", "--flag"], "unknown command xyzzy (spechead --help lists them)"),
        (["train", "--optim.lrr", "1"], "unknown option optim.lrr (did you mean optim.lr?)"),
        (["summary", "nowhere"], "option run: no report at nowhere/eval/report.json"),
        (["generate", "--prompt", "x"], "head"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ends(argv, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("spechead: error: ") and err.count("\n") == 1
    assert message in err


def test_words_reach_the_command_of_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[InspectOptions] = []

    def inspect(options: InspectOptions) -> None:
        seen.append(options)

    monkeypatch.setattr("spechead.data.inspect.inspect", inspect)
    main.main(["data", "inspect", "a.jsonl", "--limit", "3"])
    assert seen == [InspectOptions(file="a.jsonl", limit=3)]


def test_export_takes_the_usual_short_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ExportOptions] = []

    def export(options: ExportOptions) -> None:
        seen.append(options)

    monkeypatch.setattr("spechead.formats.export.export", export)
    main.main(["export", "--head", "h", "--to", "vllm", "-o", "somewhere"])
    assert seen[0].out == "somewhere"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("option x: bad"), 2, "spechead: error: option x: bad\n"),
        (KeyboardInterrupt(), 130, "spechead: interrupted\n"),
        (
            OSError(errno.ENOSPC, "", "a/b.json"),
            2,
            "spechead: error: cannot write a/b.json: no space left on the device\n",
        ),
        (PermissionError(errno.EACCES, "", "a"), 2, "spechead: error: cannot write a: permission denied\n"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(monkeypatch, error)
    assert ends(["fails"], capsys) == (code, "", line)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, FileNotFoundError(errno.ENOENT, "gone", "x"))
    with pytest.raises(FileNotFoundError):
        main.main(["fails"])


def test_the_other_processes_of_a_job_let_the_first_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(main.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    command(monkeypatch, UserError("bad"))
    assert ends(["fails"], capsys)[0] == 2
    monkeypatch.setenv("RANK", "0")
    assert ends(["fails"], capsys)[0] == 2
    assert waits == [3]


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False, **options)  # type: ignore[call-overload]


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "from spechead.cli.main import one_line_errors\nwith one_line_errors():\n  while True: print('x' * 999)"
    script = '"$0" -c "$1" | head -1; exit "${PIPESTATUS[0]}"'
    done = run("bash", "-c", script, sys.executable, code)
    assert (done.returncode, done.stdout, done.stderr) == (141, "x" * 999 + "\n", "")


def test_the_torchrun_entry_reports_as_the_command_does(tmp_path: Path) -> None:
    entry = Path(__file__).parents[2] / "recipes" / "train.py"
    done = run(sys.executable, str(entry), "--config", "eagle3-smollm2", "--optim.lr=-1", cwd=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "spechead: error: option optim.lr: must be above 0, got -1.0\n"
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).parent / "spechead"
    assert run(str(script), "--version").stdout == f"spechead {main.__version__}\n"


def test_a_missing_package_of_an_extra_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, main.one_line_errors():
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    assert end.value.code == 2
    assert capsys.readouterr().err == "spechead: error: No module named 'deepspeed': pip install 'spechead[train]'\n"
    with pytest.raises(ModuleNotFoundError), main.one_line_errors():
        raise ModuleNotFoundError("No module named 'other'", name="other")
