"""Training on a tiny target.

Two processes equal one, a killed run resumes bit-exactly, weights move, bad runs are refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead.errors import UserError
from spechead.files import locked
from spechead.heads import HEADS
from spechead.heads.files import load_head, read_info
from spechead.target.model import Target
from spechead.training.checkpoints import TrainState, list_checkpoints, step_of
from spechead.training.extract_head import ExtractOptions, extract_head
from spechead.training.log import read_log
from spechead.training.recipe import Recipe
from spechead.training.running_metrics import RunningMetrics
from spechead.training.train import Run, train, train_step
from tests.helpers.training import files, flags, kill_after_a_checkpoint, launch, recipe, weights


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


def test_loss_falls_in_the_log(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe(folder, out, **{"optim.steps": 30}))
    rows = read_log(out)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < 0.85 * rows[0]["loss"]
    assert rows[-1]["validation/acceptance_length"] >= rows[3]["validation/acceptance_length"] >= 1.0
    logged = {"accuracy@1", "accuracy@2", "outside_vocabulary", "tokens_per_s", "lr", "grad_norm", "tokens"}
    assert logged <= rows[0].keys() and "validation/outside_vocabulary" in rows[3]
    assert (out / "training_curve.png").stat().st_size > 1000
    best = max((row for row in rows if "validation/loss" in row), key=lambda row: row["validation/acceptance_length"])
    kept = {step_of(path) for path in list_checkpoints(out / "checkpoints")}
    assert kept == {27, 30, best["step"]}  # the newest two and the best
    assert (out / "run.json").is_file()


@pytest.mark.parametrize("zero", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1))])
def test_two_processes_equal_one(zero: int, folder: Path, tmp_path: Path) -> None:
    """With one held-out sample, so that one of them has nothing to validate."""
    changes = {"engine.zero_stage": zero, "optim.ema": 0.5, "data.validation_share": 0.01, "log.best": "false"}
    train(recipe(folder, tmp_path / "one", **changes))
    process = launch(flags(folder, tmp_path / "two", **changes), 2)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    one, two = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["tokens"] == b["tokens"]
        assert a.get("validation/loss", 0) == pytest.approx(b.get("validation/loss", 0), rel=1e-5)
    for name, tensor in weights(tmp_path / "one").items():
        assert torch.allclose(tensor.float(), weights(tmp_path / "two")[name].float(), atol=1e-5), name
    assert files(extract_head(ExtractOptions(str(tmp_path / "two")))) == files(tmp_path / "two" / "head")


def test_cached_features_do_not_change_the_weights(folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "live"))
    train(recipe(folder, tmp_path / "cached", **{"engine.feature_memory_gb": 1}))
    for name, tensor in weights(tmp_path / "live").items():
        assert torch.equal(tensor, weights(tmp_path / "cached")[name]), name


def test_accumulation_does_not_change_the_curve(folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "whole", **{"optim.micro_batch_size": 4}))
    train(recipe(folder, tmp_path / "parts", **{"optim.micro_batch_size": 1}))
    for a, b in zip(read_log(tmp_path / "whole"), read_log(tmp_path / "parts"), strict=True):
        assert a["lr"] == b["lr"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.allclose(tensor.float(), weights(tmp_path / "parts")[name].float(), atol=1e-5), name


@pytest.mark.parametrize("kind", HEADS)
def test_an_interrupted_run_resumes_bit_exactly(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"optim.ema": 0.9}
    train(recipe(folder, tmp_path / "straight", kind, **changes))

    def interrupted(run: Run, state: TrainState, metrics: RunningMetrics) -> None:
        if state.step == 4:  # one step after a checkpoint
            raise KeyboardInterrupt
        train_step(run, state, metrics)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("spechead.training.train.train_step", interrupted)
        train(recipe(folder, tmp_path / "resumed", kind, **changes))
    same_as_straight(tmp_path, recipe(folder, tmp_path / "resumed", kind, **changes))


def test_a_killed_run_resumes_bit_exactly(folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "straight"))
    out = tmp_path / "resumed"
    kill_after_a_checkpoint(flags(folder, out), out)
    (out / "run.json").unlink(missing_ok=True)  # where the kill came after the end
    same_as_straight(tmp_path, recipe(folder, out))


def same_as_straight(root: Path, resumed: Recipe) -> None:
    """Resume a run; its head and log equal those of the run in `root`/straight."""
    train(resumed)
    for name, tensor in weights(root / "straight").items():
        assert torch.equal(tensor, weights(Path(resumed.out))[name]), name
    lines = [json.loads(line) for line in (Path(resumed.out) / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "loss" in row] == list(range(1, 9))


def test_gradient_checkpointing_does_not_change_the_weights(folder: Path, tmp_path: Path) -> None:
    changes = {"engine.precision": "bf16", "engine.zero_stage": 2, "optim.steps": 3}
    for name, twice in (("kept", "false"), ("computed_twice", "true")):
        train(recipe(folder, tmp_path / name, **changes | {"engine.gradient_checkpointing": twice}))
    for name, tensor in weights(tmp_path / "kept").items():
        assert torch.equal(tensor, weights(tmp_path / "computed_twice")[name]), name


def test_answers_of_another_target_are_reported_and_recorded_with_the_head(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    data.write_text(
        "".join(line.replace('"meta": {"target"', '"meta": {"by"') if i < 3 else line for i, line in enumerate(lines))
    )
    for name, foreign in (("own", ""), ("mixed", f"3 of 12 answers are not marked as written by {folder / 'target'}")):
        source = data if foreign else folder / "data.jsonl"
        head = train(recipe(folder, tmp_path / name, **{"data.train": source, "optim.steps": 1}))
        again = extract_head(ExtractOptions(run=str(tmp_path / name)))
        assert read_info(head).foreign_data == read_info(again).foreign_data == foreign
        assert foreign in capsys.readouterr().out


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
        with pytest.raises(UserError, match=r"option out: .* contains a run with"):
            train(recipe(folder, out, **changes))
    train(recipe(folder, out, **{"engine.feature_memory_gb": 1}))


def test_other_data_under_the_same_name_is_refused(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes((folder / "data.jsonl").read_bytes())
    train(recipe(folder, tmp_path / "run", **{"data.train": data}))
    (tmp_path / "run" / "run.json").unlink()
    data.write_text(data.read_text().replace("the answer ab", "the answer ba"))
    with pytest.raises(UserError, match=r"contains a run with facts\.data = "):
        train(recipe(folder, tmp_path / "run", **{"data.train": data}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head.options.layers": "[99]"}, r"head\.options\.layers"),
        ({"adapter.peft": "{peft_type: none}"}, "peft_type"),
        ({"optim.patience": 1, "log.validate_every": 8}, "optim.patience: 1 counts .*validate_every 8 of 8 steps"),
        ({"optim.patience": 1, "data.limit": 1}, "optim.patience: 1 .* with 0 held-out samples"),
    ],
)
def test_a_refused_run_leaves_no_folder(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(recipe(folder, tmp_path / "runs" / "run", **changes))
    assert not (tmp_path / "runs").exists()


def test_an_unwritable_place_is_reported_before_the_target_is_loaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the folder .*file/run: .*file is a file"):
        train(recipe(folder, tmp_path / "file" / "run", **{"target.name": "no such"}))


def test_data_written_with_other_template_keywords_is_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes((folder / "data.jsonl").read_bytes())
    (tmp_path / "data.jsonl.meta.json").write_text(json.dumps({"options": {"template_kwargs": {"thinking": False}}}))
    warning = f'data: {data} was written with template keywords {{"thinking": false}}, here they are '
    train(recipe(folder, tmp_path / "other", **{"data.train": data, "optim.steps": 1}))
    assert capsys.readouterr().out.count(warning + "{}: ") == 1
    same = {"data.train": data, "optim.steps": 1, "target.template_kwargs": "{thinking: false}"}
    train(recipe(folder, tmp_path / "same", **same))
    assert "template keywords" not in capsys.readouterr().out
    head = json.loads((tmp_path / "same" / "head" / "config.json").read_text())
    assert head["meta"]["template_kwargs"] == {"thinking": False}


def test_a_loss_that_is_not_finite_names_step_and_samples(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step \d+: the loss is nan on the conversation.* line \d+"):
        train(recipe(folder, tmp_path / "run", **{"optim.lr": 1e30, "optim.clip_norm": 0}))


@pytest.mark.parametrize("clip", [0, 1])
def test_a_gradient_that_is_not_finite_reaches_no_checkpoint(
    clip: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HEADS["eagle3"].training_step
    calls = 0

    def poisoned(self: Any, batch: Any, out: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(self, batch, out)
        if calls == 11:  # in the sixth step, after which a checkpoint is due
            result.loss = result.loss + (self.norm.weight * 0).abs().sqrt().sum()  # 0, with a gradient of 0 / 0
        return result

    monkeypatch.setattr(HEADS["eagle3"], "training_step", poisoned)
    changes = {"optim.clip_norm": clip, "log.validate_every": 0}
    with pytest.raises(UserError, match="step 6: a gradient is not finite"):
        train(recipe(folder, tmp_path / "run", **changes))
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [3]


def test_weights_that_blow_up_in_the_last_step_are_no_head(folder: Path, tmp_path: Path) -> None:
    changes = {"optim.steps": 1, "optim.lr": 1e38}
    with pytest.raises(UserError, match="step 1: the loss of the validation is nan"):
        train(recipe(folder, tmp_path / "seen", **changes))
    with pytest.raises(UserError, match="the head is not written: .* non-finite"):
        train(recipe(folder, tmp_path / "unseen", **changes | {"optim.lr": 1e39, "data.validation_share": 0}))
    assert not list(tmp_path.glob("*/head/*")) and not list(tmp_path.glob("*/run.json"))


def test_two_runs_do_not_write_to_one_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with locked(out, "out"), pytest.raises(UserError, match="option out: another process writes to .*run"):
        train(recipe(folder, out))
    assert [path.name for path in out.iterdir()] == [".lock"]  # above all, recipe.json is still the other run's
    train(recipe(folder, out))


def test_damage_in_a_run_is_named_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(recipe(folder, out, **{"log.keep": 9}))
    with pytest.raises(UserError, match=r"run with log\.best = True, now False"):
        train(recipe(folder, out, **{"log.best": "false"}))
    shutil.rmtree(out / "head")
    with pytest.raises(UserError, match="no head although its run is finished, write .*extract-head .* --step [48] "):
        train(recipe(folder, out))
    (out / "run.json").unlink()
    (out / "checkpoints" / "step-of-mine").mkdir()  # somebody's copy
    newest = list_checkpoints(out / "checkpoints")[-1]
    assert newest.name == "step-00000008"
    for damage in ("cut", "empty", "gone"):
        for file in newest.iterdir():
            file.unlink() if damage == "gone" else file.write_bytes(b"cut" if damage == "cut" else b"")
        with pytest.raises(UserError, match="step-00000008: it is damaged.*; remove it, and the run resumes"):
            train(recipe(folder, out))
    shutil.rmtree(newest)
    (out / "recipe.json").rename(tmp_path / "recipe.json")
    for content in (None, "[]"):
        if content:
            (out / "recipe.json").write_text(content)
        with pytest.raises(UserError, match="recipe.json is missing or no recipe: choose another --out"):
            train(recipe(folder, out))
    (tmp_path / "recipe.json").rename(out / "recipe.json")
    assert (train(recipe(folder, out)) / "config.json").is_file()


def test_a_validation_that_dies_costs_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"log.checkpoint_every": 4}
    train(recipe(folder, tmp_path / "straight", **changes))
    with monkeypatch.context() as dying, pytest.raises(MemoryError):
        dying.setattr("spechead.training.train.validate", lambda *_: (_ for _ in ()).throw(MemoryError))
        train(recipe(folder, tmp_path / "died", **changes))
    assert [step_of(path) for path in list_checkpoints(tmp_path / "died" / "checkpoints")] == [4]
    train(recipe(folder, tmp_path / "died", **changes))
    for name, tensor in weights(tmp_path / "straight").items():
        assert torch.equal(tensor, weights(tmp_path / "died")[name]), name
    logs = [[without_clocks(row) for row in read_log(tmp_path / name)] for name in ("straight", "died")]
    assert logs[0] == logs[1] and "validation/loss" in logs[1][3]


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "time" and not name.endswith("tokens_per_s")}
