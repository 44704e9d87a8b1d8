"""The comparison of heads: its table of heads, its numbers by hand, then the script on a tiny target, and again."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import compare
from spechead.cli.main import one_line_errors
from spechead.heads import HEADS
from spechead.training.recipe import load_recipe
from tests.helpers import targets
from tests.helpers.training import write_tiny


def test_every_kind_of_head_is_compared_and_all_see_the_same() -> None:
    options = compare.CompareOptions()
    recipes = {name: compare.recipe_of(name, options, []) for name in compare.VARIANTS}
    assert {recipe.head.kind for recipe in recipes.values()} == set(HEADS)
    first = recipes["eagle3"]
    for recipe in recipes.values():
        assert (recipe.target, recipe.data, recipe.seed) == (first.target, first.data, first.seed)
        assert recipe.head.tree == compare.TREE and recipe.engine == first.engine
        assert (recipe.optim.batch_size, recipe.engine.feature_memory_gb) == (1, 0)
    unlike = {json.dumps([recipe.head.kind, recipe.head.options], sort_keys=True) for recipe in recipes.values()}
    assert len(unlike) == len(recipes)


def test_the_steps_fill_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = compare.CompareOptions(budget_s=30.0)
    monkeypatch.setattr(compare, "trial", lambda *_: 1000.0)
    monkeypatch.setattr(compare, "head_sizes", lambda _: {"parameters": 7, "tokens_per_step": 250.0})
    recipe = compare.planned("medusa", options, tmp_path)
    assert (
        recipe.optim.steps == 30 * 1000 / 250 and recipe.optim.schedule == load_recipe("medusa-smollm2").optim.schedule
    )
    monkeypatch.setattr(compare, "trial", lambda *_: pytest.fail("it is known"))
    assert compare.planned("medusa", options, tmp_path).to_dict() == recipe.to_dict()
    (tmp_path / "plan.json").unlink()
    monkeypatch.setattr(compare, "trial", lambda *_: 1.0)
    assert compare.planned("medusa", options, tmp_path).optim.steps == 1, "never none"


def test_the_trial_leaves_its_first_third_out_and_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(recipe: Any) -> None:
        assert (recipe.optim.steps, recipe.log.every, recipe.data.validation_share) == (30, 10, 0)
        (tmp_path / "trial").mkdir()

    monkeypatch.setattr(compare, "train", train)
    rows = [{"tokens_per_s": rate} for rate in (1.0, 100.0, 300.0)]
    monkeypatch.setattr(compare, "read_log", lambda _: rows)
    (tmp_path / "trial" / "checkpoints").mkdir(parents=True)  # of one that was interrupted
    assert compare.trial("medusa", compare.CompareOptions(), tmp_path / "trial") == 200.0
    assert not (tmp_path / "trial").exists()


# ------------------------------------------------------------------------------------------------ the script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with as many layers as the recipes tap, conversations and prompts."""
    patch = pytest.MonkeyPatch()
    patch.setitem(targets.BASE, "num_hidden_layers", 30)
    root = write_tiny(tmp_path_factory.mktemp("compare"))
    patch.undo()
    asked = [{"question_id": i, "category": "c", "turns": [text]} for i, text in enumerate(["ab ab ab", "x y", "z"])]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, asked)))
    return root


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[..., dict[str, Any]]:
    def start(*more: str) -> dict[str, Any]:
        patch = pytest.MonkeyPatch()
        patch.chdir(folder)
        patch.setattr(compare, "TRIAL", 3)
        try:
            compare.main(
                [
                    *("--target", str(folder / "target"), "--data", str(folder / "data.jsonl"), "--device", "cpu"),
                    *("--prompt-file", "prompts.jsonl", "--prompts", "2", "--max-new-tokens", "6"),
                    *("--budget-s", "0.2", "--work", "work", "--out", "out/compare.json", *more),
                ]
            )
        finally:
            patch.undo()
        return dict(json.loads((folder / "out" / "compare.json").read_text()))

    return start


@pytest.mark.slow
def test_the_script_trains_measures_and_is_not_done_twice(
    run: Callable[..., dict[str, Any]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run("--only", "medusa")
    assert list(found["heads"]) == ["medusa"]
    found = run("--only", "eagle3", "--only", "medusa")
    assert list(found["heads"]) == ["eagle3", "medusa"], "in the order of the table, the finished one among them"
    assert found["budget_s"] == 0.2 and found["settings"]["prompts"] == 2 and "processor" in found["machine"]
    for name, head in found["heads"].items():
        for key in ("parameters", "train_tokens_per_s", "train_s", "speedup", "draft_s", "steps"):
            assert head[key] > 0, key
        assert head["acceptance_length_chain"] >= 1 and head["acceptance_length_tree"] >= 1
        assert head["identical"] == "2/2"
        report = json.loads((folder / "work" / name / "eval" / "report.json").read_text())
        entry = report["suites"]["prompts"]
        assert (entry["tree"], entry["prompts"]) == (compare.TREE, 2)
        assert (entry["acceptance_length"], entry["speedup"]) == (head["acceptance_length_tree"], head["speedup"])
        assert head["draft_s"] == entry["seconds"]["draft"] / entry["passes"]
        steps = json.loads((folder / "work" / name / "run" / "run.json").read_text())["recipe"]["optim"]["steps"]
        assert steps == head["steps"]
        assert not (folder / "work" / name / "trial").exists()
    weights = 4 * (32 * 32 + 32 + 97 * 32)  # four residual blocks and output layers
    assert found["heads"]["medusa"]["parameters"] == weights

    page = (folder / "out" / "compare.html").read_text()
    HTMLParser().feed(page)
    assert page.count("<svg") == 3 and "src=" not in page and "eagle3" in page and "medusa" in page

    fast, slow = found["heads"]["medusa"] | {"speedup": 2.0}, found["heads"]["eagle3"] | {"speedup": 1.0}
    page = compare.page(found | {"heads": {"eagle3": slow, "medusa": fast}})
    assert page.index("<td>medusa</td>") < page.index("<td>eagle3</td>"), "the fastest first"

    monkeypatch.setattr(compare, "train", lambda _: pytest.fail("trained again"))
    monkeypatch.setattr(compare, "evaluate", lambda _: pytest.fail("measured again"))
    assert run("--only", "eagle3") == found


def test_all_are_trained_before_the_first_is_measured_and_a_restart_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, str]] = []
    threads = torch.get_num_threads()

    def train(recipe: Any) -> None:
        torch.set_num_threads(recipe.engine.threads)
        calls.append(("train", recipe.head.kind))

    def measure(options: compare.CompareOptions, folder: Path) -> None:
        assert torch.get_num_threads() == threads, "measured on all threads"
        calls.append(("measure", folder.name))
        if len(calls) == 4:
            raise KeyboardInterrupt
        (folder / "eval").mkdir()
        (folder / "eval" / "report.json").touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "trial", lambda *_: 1000.0)
    monkeypatch.setattr(compare, "head_sizes", lambda _: {"parameters": 7, "tokens_per_step": 250.0})
    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "write", lambda _: None)
    flags = ["--only", "hydra", "--only", "eagle", "--threads", "2"]
    with pytest.raises(KeyboardInterrupt):
        compare.main(flags)
    assert calls == [("train", "hydra"), ("train", "eagle"), ("measure", "hydra"), ("measure", "eagle")]
    calls.clear()
    monkeypatch.setattr(compare, "trial", lambda *_: pytest.fail("tried again"))
    compare.main(flags)
    assert calls == [("train", "eagle"), ("measure", "eagle")], "the finished head is left alone"
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget-s", "0"], "option budget_s: must be above 0, got 0.0"),
        (["--prompts", "-1"], "option prompts: must be at least 0, got -1"),
        (["--only", "eagle4"], "option only: 'eagle4' is unknown, use eagle3, eagle, hass"),
        (["--out", "x"], "option out: must end with .json, got x"),
        (["--budget-s", "9", "--work", "work"], "work was begun with budget_s = 5.0, now 9.0"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compare.begin(compare.CompareOptions(budget_s=5.0, work="work"))
    monkeypatch.setattr(compare, "train", lambda _: pytest.fail("trained"))
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        compare.main(flags)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"spechead: error: {message}") and error.count("\n") == 1
