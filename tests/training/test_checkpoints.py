"""Checkpoints: the best validation and when a run stops, resuming around a kill, writes that fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from spechead.training.checkpoints import TrainState, list_checkpoints, read_weights, step_of
from spechead.training.extract_head import ExtractOptions, extract_head
from spechead.training.log import read_log
from spechead.training.running_metrics import RunningMetrics
from spechead.training.train import Run, train, train_step
from tests.helpers.training import files, recipe, weights


def state_after(*lengths: float) -> TrainState:
    """Validations after steps 10, 20, ..."""
    return TrainState(validations=[(10 * (i + 1), length) for i, length in enumerate(lengths)])


@pytest.mark.parametrize(
    ("lengths", "best"),
    [((), 0), ((1.5,), 10), ((1.5, 1.7, 1.6), 20), ((1.5, 1.7, 1.7), 20), ((1.0, 1.0, 1.0), 10)],
)
def test_the_best_is_the_first_of_the_greatest(lengths: tuple[float, ...], best: int) -> None:
    assert state_after(*lengths).best == best


@pytest.mark.parametrize(
    ("lengths", "patience", "stops_after"),
    [
        ((1.5, 1.7, 1.6, 1.6, 1.9), 2, 4),  # the better one would have come too late
        ((1.5, 1.7, 1.6, 1.8, 1.8, 1.7), 2, 6),  # an improvement starts the count anew; an equal one is none
        ((1.5, 1.4), 1, 2),
        ((1.5, 1.6, 1.7), 1, None),
        ((1.5, 1.4, 1.3, 1.2), 0, None),
    ],
)
def test_patience_ends_with_validations_without_improvement(
    lengths: tuple[float, ...], patience: int, stops_after: int | None
) -> None:
    stops = (n for n in range(len(lengths) + 1) if state_after(*lengths[:n]).should_stop(patience))
    assert next(stops, None) == stops_after


VALIDATED = {1: 1.5, 2: 2.0, 3: 1.9, 4: 1.8, 5: 2.0, 6: 2.1}  # acceptance length by step
AS_VALIDATED = {"optim.steps": 6, "log.validate_every": 1, "log.checkpoint_every": 3, "log.keep": 1, "optim.ema": 0.9}


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Acceptance lengths that validations return, by step; at a step that is missing the run is killed."""
    lengths = dict(VALIDATED)
    steps: list[int] = []

    def step(run: Run, state: TrainState, metrics: RunningMetrics) -> None:
        steps.append(state.step + 1)
        train_step(run, state, metrics)

    monkeypatch.setattr("spechead.training.train.train_step", step)
    monkeypatch.setattr("spechead.training.train.validate", lambda run, step: {"acceptance_length": lengths[steps[-1]]})
    return lengths


@pytest.mark.parametrize(
    ("patience", "best", "last", "head"),
    [(0, "true", 6, 6), (2, "true", 4, 2), (3, "true", 5, 2), (2, "false", 4, 4)],
)
def test_a_run_stops_and_its_head_is_the_best(
    patience: int, best: str, last: int, head: int, validated: dict[int, float], folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(recipe(folder, out, **AS_VALIDATED | {"optim.patience": patience, "log.best": best}))
    assert [row["step"] for row in read_log(out)] == list(range(1, last + 1))
    assert json.loads((out / "head" / "config.json").read_text())["meta"]["steps"] == head
    assert json.loads((out / "run.json").read_text())["steps"] == {"trained": last, "head": head}
    assert {step_of(path) for path in list_checkpoints(out / "checkpoints")} == {last, 6 if last == 6 else 2}
    at_head = read_weights(out / "checkpoints" / f"step-{head:08d}")
    for name, tensor in weights(out).items():
        assert torch.equal(tensor, at_head[f"head.{name}"]), name


@pytest.mark.parametrize("killed_at", [2, 4])
def test_a_run_killed_around_its_best_ends_as_if_it_had_not_been(
    killed_at: int, validated: dict[int, float], folder: Path, tmp_path: Path
) -> None:
    changes = AS_VALIDATED | {"optim.patience": 3}
    train(recipe(folder, tmp_path / "straight", **changes))
    out = tmp_path / "killed"
    del validated[killed_at]
    with pytest.raises(KeyError):
        train(recipe(folder, out, **changes))
    validated |= VALIDATED
    train(recipe(folder, out, **changes))
    assert files(out / "head") == files(tmp_path / "straight" / "head")
    assert [row["step"] for row in read_log(out)] == list(range(1, 6))


def test_a_run_killed_at_its_very_end_needs_its_best_checkpoint(
    validated: dict[int, float], folder: Path, tmp_path: Path
) -> None:
    out, changes = tmp_path / "run", AS_VALIDATED | {"optim.patience": 2}
    train(recipe(folder, out, **changes))
    finished = files(out / "head")
    shutil.rmtree(out / "head")
    (out / "run.json").unlink()
    train(recipe(folder, out, **changes))
    assert files(out / "head") == finished
    (out / "run.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    with pytest.raises(UserError, match=r"no checkpoint .*step-00000002"):
        train(recipe(folder, out, **changes))


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    train(recipe(folder, tmp_path / "run", **{"optim.steps": 1, "engine.zero_stage": 1}))
    written = [path.name for path in (tmp_path / "run" / "checkpoints" / "step-00000001").iterdir()]
    assert len(written) == 3 and "head.safetensors" in written
    parts = [name.rpartition("/") for name in flushed]
    assert {name for folder, _, name in parts if "/.step-00000001." in folder} == set(written)
    assert any(name.startswith(".model.safetensors") for _, __, name in parts)


def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed

    def full(_: object, save_dir: str, tag: str, **__: object) -> None:
        (Path(save_dir) / tag).mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "save_checkpoint", full)
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*step-00000003: no space left"):
        train(recipe(folder, tmp_path / "run"))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_run_of_0_1_0_is_resumed_and_then_has_a_head_to_extract(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe(folder, out, **{"optim.steps": 6, "data.validation_share": 0}))
    finished = files(out / "head")
    (out / "run.json").unlink()
    first, last = list_checkpoints(out / "checkpoints")
    shutil.rmtree(last)
    (first / "head.safetensors").unlink()  # 0.1.0 wrote none
    (out / "checkpoints" / ".step-00000006.tmp").mkdir()  # of a run that was killed
    with pytest.raises(UserError, match="step-00000003 has no head.safetensors: .* resume the run"):
        extract_head(ExtractOptions(str(out)))
    train(recipe(folder, out, **{"optim.steps": 6, "data.validation_share": 0}))
    assert files(out / "head") == files(extract_head(ExtractOptions(str(out)))) == finished
    assert not list((out / "checkpoints").glob(".*"))
