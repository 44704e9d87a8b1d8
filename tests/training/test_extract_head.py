"""A head out of a checkpoint: the one that the run itself writes at that step, whoever trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from spechead.heads import HEADS
from spechead.heads.files import load_head
from spechead.target.model import Target
from spechead.training.checkpoints import list_checkpoints, step_of
from spechead.training.extract_head import ExtractOptions, extract_head
from spechead.training.train import train
from tests.helpers.training import files, flags, kill_after_a_checkpoint, recipe


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints after the sixth and the last. Not to be changed."""
    out = tmp_path_factory.mktemp("run")
    train(recipe(folder, out, **{"data.validation_share": 0}))
    return out


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("zero,precision", [(0, "float32"), (0, "bf16"), (1, "float32"), (2, "bf16")])
def test_the_last_checkpoint_gives_the_runs_own_head(
    kind: str, zero: int, precision: str, folder: Path, tmp_path: Path
) -> None:
    changes = {"optim.ema": 0.9 if kind == "eagle3" else 0, "log.best": "false"}
    changes |= {"engine.zero_stage": zero, "engine.precision": precision, "head.tree": "chain:2"}
    changes |= {"target.template_kwargs": "{thinking: false}", "optim.lr": 1e-4}  # bf16 would round such steps away
    train(recipe(folder, tmp_path / "run", kind, **changes))
    out = extract_head(ExtractOptions(str(tmp_path / "run")))
    assert out == tmp_path / "run" / "head-step-8"
    assert files(out) == files(tmp_path / "run" / "head")


def test_a_killed_run_gives_a_head_without_its_data(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    shutil.copy(folder / "data.jsonl", data)
    out = tmp_path / "killed"
    changes = {"data.train": data, "optim.steps": 500, "log.checkpoint_every": 2, "data.validation_share": 0}
    kill_after_a_checkpoint(flags(folder, out, **changes), out)
    assert not (out / "head").exists()
    data.unlink()
    head = extract_head(ExtractOptions(str(out)))
    step = step_of(list_checkpoints(out / "checkpoints")[-1])
    assert head == out / f"head-step-{step}"
    assert json.loads((head / "config.json").read_text())["meta"]["steps"] == step
    loaded = load_head(head, Target.load(str(folder / "target")), dtype=torch.float32)
    assert loaded.kind == "eagle3"
    file = out / "checkpoints" / f"step-{step:08d}" / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=True)["module"]  # float32 on one process: the masters as they are
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, saved[f"head.{name}"]), name


def test_the_best_checkpoint_is_there_and_gives_the_runs_own_head(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe(folder, run, **{"optim.lr": 0.03, "log.validate_every": 1, "log.keep": 1, "optim.ema": 0.5}))
    best = json.loads((run / "run.json").read_text())["steps"]["head"]
    assert best < 8, "the last step is the best: this proves nothing"
    assert files(extract_head(ExtractOptions(str(run), step=best))) == files(run / "head")


def test_a_step_and_a_folder_can_be_chosen(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = extract_head(ExtractOptions(str(finished), step=6, out=str(tmp_path / "mine")))
    assert out == tmp_path / "mine"
    assert json.loads((out / "config.json").read_text())["meta"]["steps"] == 6
    assert capsys.readouterr().out.splitlines() == [
        f"head of step 6: {out}",
        f"measure it:      spechead eval --head {out}",
    ]


def test_mistakes_are_one_line(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"option step: no checkpoint of step 7 in .* \(known: 6, 8\)"):
        extract_head(ExtractOptions(str(finished), step=7))
    with pytest.raises(UserError, match=r"nowhere is not the folder of a run, it has no recipe\.json"):
        extract_head(ExtractOptions(str(tmp_path / "nowhere")))
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(finished / "recipe.json", begun)
    with pytest.raises(UserError, match="no checkpoint in "):
        extract_head(ExtractOptions(str(begun)))


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("facts", "target", "0" * 64, "option run: the weights of target .* have changed since"),
        (
            "head",
            "options",
            {"draft_vocab_size": 32, "steps": 2},
            "does not fit .*recipe.json: .*size mismatch for d2t",
        ),
        ("target", "nmae", "x", "recipe.json: not a recipe that this version can read: .*nmae"),
    ],
)
def test_a_run_that_is_not_what_it_was_is_refused(
    part: str, name: str, value: object, message: str, finished: Path, tmp_path: Path
) -> None:
    tree = json.loads((finished / "recipe.json").read_text())
    tree[part][name] = value
    (tmp_path / "recipe.json").write_text(json.dumps(tree))
    (tmp_path / "checkpoints").symlink_to(finished / "checkpoints")
    with pytest.raises(UserError, match=message) as refused:
        extract_head(ExtractOptions(str(tmp_path)))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "head-step-8").exists()


def test_a_damaged_file_is_named(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "recipe.json", tmp_path)
    shutil.copytree(finished / "checkpoints" / "step-00000008", tmp_path / "checkpoints" / "step-00000008")
    file = tmp_path / "checkpoints" / "step-00000008" / "head.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="head.safetensors: damaged"):
        extract_head(ExtractOptions(str(tmp_path)))
