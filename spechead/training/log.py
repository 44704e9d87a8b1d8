"""What a long job tells its user: progress on the console, numbers in JSONL and in wandb, a curve of them.

Knows nothing of models, data or training; a record is a step and a few named numbers. The only file that
imports wandb.

Names that `plot_curve` understands, each alone or behind a prefix such as `validation/`:
    loss                     the loss; head_loss and target_loss where it is made of both
    accuracy@K               share of positions whose draft of depth K is right
    acceptance_length        tokens per pass that those accuracies imply
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from spechead.errors import UserError
from spechead.files import make_folder, reason, write_text

LOG_NAME = "log.jsonl"
CURVE_NAME = "training_curve.png"
WANDB_ID_NAME = "wandb_id.txt"


# ------------------------------------------------------------------------------------------------ progress


# ------------------------------------------------------------------------------------------------ records


class Sink(Protocol):
    """Somewhere else that records go to."""

    def log(self, values: dict[str, Any]) -> None: ...
    def finish(self) -> None: ...


class NoWandb:
    """Stands in for a wandb run when wandb is disabled."""

    def log(self, values: dict[str, Any]) -> None:
        pass

    def finish(self) -> None:
        pass


class NoLog:
    """Stands in for a RunLog in every process but the first."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class RunLog:
    """Records of one run: lines of `log.jsonl`, flushed one by one, and a wandb run.

    `resume`: the step behind which the lines and the wandb run are carried on; lines of later steps, which an
    interrupted run wrote behind its last checkpoint, are dropped. With 0 both start anew.
    """

    def __init__(
        self,
        folder: Path,
        wandb_mode: str = "disabled",
        project: str = "spechead",
        config: Mapping[str, Any] | None = None,
        resume: int = 0,
    ) -> None:
        self.path = Path(folder) / LOG_NAME
        make_folder(self.path.parent)
        try:
            if resume and self.path.exists():
                _cut(self.path, resume)
            self._file = self.path.open("a" if resume else "w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {reason(error)}") from error
        self._sink = _open_wandb(Path(folder), wandb_mode, project, dict(config or {}), resume > 0)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Several records of one step (training, then validation) are fine: `read_log` joins them."""
        row = {"step": int(step), "time": round(time.time(), 3)} | {k: _number(v) for k, v in values.items()}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {reason(error)}") from error
        self._sink.log(row)

    def close(self) -> None:
        self._file.close()
        self._sink.finish()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """One row a step, in order of steps. A step recorded again keeps its last values."""
    rows: dict[int, dict[str, Any]] = {}
    for _, row in _records(Path(folder) / LOG_NAME):
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of the log in `path`, and what each records."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"no training log at {path}: {reason(error)}") from error
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is a half-written line
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} line {number} is not a record of a training log; remove that line") from error
        yield line, row


def _number(value: float) -> float | int | None:
    """A plain number for JSON, which has no NaN and no infinity."""
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(float(value)) else None


def _cut(path: Path, step: int) -> None:
    """Cut what a killed run left behind `step`, half a line included."""
    kept = [line for line, row in _records(path) if row["step"] <= step]
    write_text(path, "".join(f"{line}\n" for line in kept))


def _open_wandb(folder: Path, mode: str, project: str, config: dict[str, Any], resume: bool) -> Sink:
    if mode == "disabled":
        return NoWandb()
    if mode not in ("offline", "online"):
        raise UserError(f"wandb mode {mode!r} is unknown: use disabled, offline or online")
    try:
        import wandb
    except ImportError as error:
        raise UserError(f"wandb mode {mode!r} needs the package wandb: install it or use disabled") from error
    id_file = folder / WANDB_ID_NAME
    run_id = id_file.read_text().strip() if resume and id_file.exists() else None
    run = wandb.init(
        dir=str(folder),
        mode="online" if mode == "online" else "offline",
        project=project,
        config=config,
        id=run_id,
        resume="allow" if run_id else None,
    )
    # Own x axis: wandb's internal step must never go back, a resumed run does.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    id_file.write_text(run.id + "\n")
    return run


# ------------------------------------------------------------------------------------------------ curve


def plot_curve(folder: Path) -> Path:
    """Draw loss, accuracy by depth and implied acceptance length of `log.jsonl` into `training_curve.png`."""
    from matplotlib.figure import Figure

    rows = read_log(folder)
    panels = [
        ("loss", re.compile(r"(^|/)((head|target)_)?loss$")),
        ("accuracy by depth", re.compile(r"(^|/)accuracy@\d+$")),
        ("implied acceptance length", re.compile(r"(^|/)acceptance_length$")),
    ]
    names = {name for row in rows for name in row}
    shown = [(title, sorted(filter(pattern.search, names))) for title, pattern in panels]
    shown = [(title, series) for title, series in shown if series] or [("nothing recorded yet", [])]

    figure = Figure(figsize=(5.2 * len(shown), 3.8), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name in series:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            style = {"marker": "o", "markersize": 3} if "/" in name else {"alpha": 0.7, "linewidth": 1}
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if series:
            axes.legend(fontsize=8)
    path = Path(folder) / CURVE_NAME
    temporary = path.with_name(path.name + ".tmp")
    try:
        figure.savefig(temporary, format="png", dpi=130)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    return path
