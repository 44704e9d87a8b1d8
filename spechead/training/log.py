"""The log of a run: records of named numbers by step, in JSONL and in wandb, and a curve of them.

Names that `plot_curve` draws, with or without a prefix such as `validation/`:
    loss                     the loss; head_loss and target_loss where it is made of both
    accuracy@K               share of positions whose draft of depth K is correct
    acceptance_length        tokens per pass that those accuracies imply
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from spechead.errors import UserError
from spechead.files import make_folder, read_jsonl, reason, replacing, write_text

LOG_NAME = "log.jsonl"
CURVE_NAME = "training_curve.png"
WANDB_ID_NAME = "wandb_id.txt"


# ------------------------------------------------------------------------------------------------ records


class Sink(Protocol):
    """A wandb run, or what stands in for one."""

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

    `resume`: the step after which the log and the wandb run continue; lines of later steps, which an interrupted run
    wrote after its last checkpoint, are dropped. With 0 both start anew.
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
        """A step may have several records (training, then validation): `read_log` joins them."""
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
    for row in _records(Path(folder) / LOG_NAME):
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log."""
    for where, row in read_jsonl(path, "training log", growing=True):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{where}: not a record of a training log, remove that line")
        yield row


def _number(value: float) -> float | int | None:
    """A plain number for JSON, which has no NaN and no infinity."""
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(float(value)) else None


def _cut(path: Path, step: int) -> None:
    """Remove the lines after `step` that a killed run left, half a line included."""
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in _records(path) if row["step"] <= step))


def _open_wandb(folder: Path, mode: str, project: str, config: dict[str, Any], resume: bool) -> Sink:
    if mode == "disabled":
        return NoWandb()
    if mode not in ("offline", "online"):
        raise UserError(f"option log.wandb: {mode!r} is unknown, use disabled, offline or online")
    try:
        import wandb
    except ImportError as error:
        raise UserError(f"option log.wandb: {mode!r} needs the package wandb, install it or use disabled") from error
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
    # An x axis of our own: wandb's internal step must not decrease, and that of a resumed run does
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
    with replacing(path) as scratch:
        figure.savefig(scratch, format="png", dpi=130)
    return path
