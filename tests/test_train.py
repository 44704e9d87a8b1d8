"""Training on a tiny target.

Two processes equal one, a killed run resumes bit-exactly, weights move, bad runs are refused.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file

from spechead.engine import checkpoints, learning_rate_factor
from spechead.errors import UserError
from spechead.formats.native import load_head
from spechead.heads import HEADS
from spechead.log import read_log
from spechead.recipe import Recipe, load_recipe
from spechead.target import Target
from spechead.train import train

ROOT = Path(__file__).parent.parent
# Set by training in this process
RENDEZVOUS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SMALL = {"eagle3": {"draft_vocab_size": 64, "steps": 2}, "medusa": {"draft_vocab_size": 64, "n_heads": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny target and 12 conversations."""
    root = tmp_path_factory.mktemp("tiny")
    target = make_target("llama")
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "the answer " + "ab cd " * (1 + i % 4)},
            ],
            "meta": {"target": str(root / "target")},
        }
        for i in range(12)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def flags(folder: Path, out: Path, kind: str = "eagle3", **changes: Any) -> list[str]:
    options = {
        "target.name": folder / "target",
        "data.train": folder / "data.jsonl",
        "data.validation_share": 0.2,
        "head.kind": kind,
        **{f"head.options.{name}": value for name, value in SMALL[kind].items()},
        "optim.batch_size": 4,
        "optim.micro_batch_size": 2,
        "optim.steps": 8,
        "optim.lr": 0.003,
        "engine.precision": "float32",
        "log.every": 1,
        "log.checkpoint_every": 3,
        "log.validate_every": 4,
        "out": out,
    } | changes
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def recipe(folder: Path, out: Path, kind: str = "eagle3", **changes: Any) -> Recipe:
    return load_recipe("", flags(folder, out, kind, **changes))


def launch(words: list[str], processes: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "recipes/train.py"]
    if processes:
        run = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", _port()]
        command = [sys.executable, *run, "recipes/train.py"]
    inherited = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    environment = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command + words,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "head" / "model.safetensors")


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_weight_moves_and_the_head_loads(kind: str, precision: str, folder: Path, tmp_path: Path) -> None:
    changes = {"engine.precision": precision, "optim.lr": 1e-4, "optim.steps": 12}
    train(recipe(folder, tmp_path / "none", kind, **changes | {"optim.steps": 1, "optim.lr": 1e-30}))
    train(recipe(folder, tmp_path / "some", kind, **changes))
    before, after = weights(tmp_path / "none"), weights(tmp_path / "some")
    for name in before.keys() - {"d2t", "t2d"}:
        assert after[name].dtype == torch.float32
        assert not torch.equal(before[name], after[name]), name
    assert torch.equal(before["d2t"], after["d2t"])
    target = Target.load(str(folder / "target"))
    assert load_head(tmp_path / "some" / "head", target).kind == kind
    names = {name for name in after if "embed" in name or name.startswith("target")}
    assert not names


def test_loss_falls_and_the_log_tells_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe(folder, out, **{"optim.steps": 30}))
    rows = read_log(out)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < 0.85 * rows[0]["loss"]
    assert rows[-1]["validation/acceptance_length"] >= rows[3]["validation/acceptance_length"] >= 1.0
    assert {"accuracy@1", "accuracy@2", "lr", "grad_norm", "tokens"} <= rows[0].keys()
    assert (out / "training_curve.png").stat().st_size > 1000
    assert len(checkpoints(out / "checkpoints")) == 2
    assert (out / "run.json").is_file()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_processes_equal_one(zero: int, folder: Path, tmp_path: Path) -> None:
    changes = {"engine.zero_stage": zero}
    train(recipe(folder, tmp_path / "one", **changes))
    process = launch(flags(folder, tmp_path / "two", **changes), 2)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    one, two = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["tokens"] == b["tokens"]
    for name, tensor in weights(tmp_path / "one").items():
        assert torch.allclose(tensor.float(), weights(tmp_path / "two")[name].float(), atol=1e-5), name


def test_ranks_with_unequal_validation_work_together(folder: Path, tmp_path: Path) -> None:
    process = launch(flags(folder, tmp_path / "run", **{"data.validation_share": 0.01}), 2)  # one held-out sample
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert read_log(tmp_path / "run")[-1]["validation/acceptance_length"] >= 1


def test_remembered_features_do_not_change_the_weights(folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "live"))
    train(recipe(folder, tmp_path / "remembered", **{"engine.feature_memory_gb": 1}))
    for name, tensor in weights(tmp_path / "live").items():
        assert torch.equal(tensor, weights(tmp_path / "remembered")[name]), name


def test_accumulation_does_not_change_the_curve(folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "whole", **{"optim.micro_batch_size": 4}))
    train(recipe(folder, tmp_path / "parts", **{"optim.micro_batch_size": 1}))
    for a, b in zip(read_log(tmp_path / "whole"), read_log(tmp_path / "parts"), strict=True):
        assert a["lr"] == b["lr"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.allclose(tensor.float(), weights(tmp_path / "parts")[name].float(), atol=1e-5), name


@pytest.mark.parametrize("kind", HEADS)
def test_a_killed_run_resumes_bit_exactly(kind: str, folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "straight", kind))
    out = tmp_path / "killed"
    process = launch(flags(folder, out, kind, **{"optim.steps": 8}))
    deadline = time.monotonic() + 120
    while not checkpoints(out / "checkpoints") and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert checkpoints(out / "checkpoints"), output
    (out / "run.json").unlink(missing_ok=True)  # where the kill came after the end
    train(recipe(folder, out, kind))
    for name, tensor in weights(tmp_path / "straight").items():
        assert torch.equal(tensor, weights(out)[name]), name
    assert [row["step"] for row in read_log(out)] == list(range(1, 9))


def test_a_finished_run_is_not_repeated_and_another_recipe_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe(folder, out))
    written = (out / "head" / "model.safetensors").stat().st_mtime_ns
    train(recipe(folder, out, **{"log.every": 2}))
    assert (out / "head" / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"optim\.lr"):
        train(recipe(folder, out, **{"optim.lr": 0.5}))
    (out / "run.json").unlink()  # as if killed before the end
    for changes in ({"optim.lr": 0.5}, {"head.options.draft_vocab_size": 32}, {"data.limit": 8}):
        with pytest.raises(UserError, match=r"holds a run with"):
            train(recipe(folder, out, **changes))
    train(recipe(folder, out, **{"engine.feature_memory_gb": 1}))


def test_a_loss_that_is_not_finite_names_step_and_samples(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step \d+: the loss is nan on conversation"):
        train(recipe(folder, tmp_path / "run", **{"optim.lr": 1e30, "optim.clip_norm": 0}))


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


@pytest.mark.parametrize("schedule,last", [("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_schedules_by_hand(schedule: str, last: float) -> None:
    factor = learning_rate_factor(schedule, 11, 0.2, 0.1)
    assert [factor(0), factor(1), factor(2)] == [0.5, 1.0, 1.0]
    assert factor(10) == pytest.approx(last)
    assert factor(6) == pytest.approx({"cosine": 0.55, "linear": 0.55, "constant": 1.0}[schedule])
