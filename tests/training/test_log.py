"""Progress lines, the JSONL log with resume, the wandb edge, the curve."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from spechead.errors import UserError
from spechead.training.log import RunLog, plot_curve, read_log


def test_records_of_one_step_are_joined_and_ordered(tmp_path: Path) -> None:
    run = RunLog(tmp_path / "new" / "folder")
    run.record(1, {"loss": 3.0})
    run.record(2, {"loss": float("nan"), "count": 7})
    run.record(2, {"validation/loss": 2.5})
    run.close()
    rows = [{k: v for k, v in row.items() if k != "time"} for row in read_log(tmp_path / "new" / "folder")]
    assert rows == [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": None, "count": 7, "validation/loss": 2.5},
    ]


def test_records_are_on_disk_before_close(tmp_path: Path) -> None:
    run = RunLog(tmp_path)
    run.record(1, {"loss": 3.0})
    assert read_log(tmp_path)[0]["loss"] == 3.0
    run.close()


def test_resume_carries_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    first = RunLog(tmp_path)
    first.record(1, {"loss": 3.0})
    first.record(2, {"loss": 2.0})
    first.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_log(tmp_path)] == [1, 2]
    second = RunLog(tmp_path, resume=1)  # its last checkpoint
    assert [row["step"] for row in read_log(tmp_path)] == [1]
    second.record(2, {"loss": 1.5})
    second.record(3, {"loss": 1.0})
    second.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [(json.loads(line)["step"], json.loads(line)["loss"]) for line in lines] == [(1, 3.0), (2, 1.5), (3, 1.0)]


def test_without_resume_the_log_starts_anew(tmp_path: Path) -> None:
    for loss in (3.0, 2.0):
        run = RunLog(tmp_path)
        run.record(1, {"loss": loss})
        run.close()
    assert [row["loss"] for row in read_log(tmp_path)] == [2.0]


def test_a_broken_line_or_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the training log"):
        read_log(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(UserError, match="line 2"):
        read_log(tmp_path)


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        RunLog(tmp_path / "file")
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot write the log"):
        RunLog(tmp_path)


OFFLINE = """
import sys
from pathlib import Path
from spechead.training.log import RunLog
for resume in (0, 1):
    run = RunLog(Path(sys.argv[1]), "offline", "p", {"optim": {"betas": [0.9, 0.95]}}, resume)
    run.record(1 + resume, {"loss": 2.0, "validation/loss": float("nan")})
    run.close()
"""


def test_the_real_wandb_writes_an_offline_run_and_carries_it_on(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb_id.txt").read_text().strip()
    written = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert written and all(b"validation/loss" in path.read_bytes() for path in written)
    assert [row["step"] for row in read_log(tmp_path)] == [1, 2]


class FakeRun:
    id = "abc"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.finished = False

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_every_record_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inits: list[dict[str, Any]] = []
    run = FakeRun()

    def init(**kwargs: Any) -> FakeRun:
        inits.append(kwargs)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for resume in (0, 4):
        written = RunLog(tmp_path, "offline", "p", {"lr": 1.0}, resume)
        written.record(5, {"loss": 1.0})
        written.close()
    assert [(i["mode"], i["project"], i["id"], i["resume"]) for i in inits] == [
        ("offline", "p", None, None),
        ("offline", "p", "abc", "allow"),
    ]
    assert [(row["step"], row["loss"]) for row in run.rows] == [(5, 1.0), (5, 1.0)]
    assert run.finished


def test_disabled_wandb_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = RunLog(tmp_path, "disabled")
    run.record(1, {"loss": 1.0})
    run.close()
    with pytest.raises(UserError, match="needs the package wandb"):
        RunLog(tmp_path, "online")
    with pytest.raises(UserError, match="option log.wandb: 'on' is unknown"):
        RunLog(tmp_path, "on")


def test_curve_is_a_png_also_before_the_first_record(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    assert plot_curve(tmp_path).read_bytes().startswith(b"\x89PNG")
    run = RunLog(tmp_path)
    for step in range(1, 20):
        run.record(step, {"loss": 5 / step, "accuracy@1": step / 40, "accuracy@2": step / 80, "lr": 1e-3})
    run.record(19, {"validation/loss": 0.5, "validation/accuracy@1": 0.4, "validation/acceptance_length": 1.5})
    run.close()
    path = plot_curve(tmp_path)
    assert path == tmp_path / "training_curve.png" and path.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["loss"] == 5
