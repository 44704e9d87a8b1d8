"""The command that chooses a tree: its texts, its costs, and what it saves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spechead.cli import main
from spechead.data.prompts import read_prompts
from spechead.decoding.tree import Static, parse_tree
from spechead.errors import UserError
from spechead.evaluation import tune
from spechead.evaluation.tree_search import Costs
from spechead.files import shipped
from spechead.heads.files import load_head, read_info, save_head
from spechead.target.model import Target
from spechead.training.build import load_data
from spechead.training.distributed import Ranks
from spechead.training.recipe import DataConfig
from spechead.training.train import train
from tests.helpers.heads import OPTIONS, make_head, sample, trained
from tests.helpers.targets import make_target
from tests.helpers.training import recipe, write_tiny


def test_measured_costs_are_those_of_the_speed_model(target: Target) -> None:
    texts = [sample(target, 24, seed) for seed in (3, 4)]
    costs = tune.measure_costs(make_head("medusa", target), texts, 3)
    assert list(costs.v)[:3] == [1, 2, 3] and costs.v[1] == 1.0
    assert 0 < costs.plain_verify < 1 and costs.step > 0 and costs.rest > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target on disk, a trained Medusa head for it, prompts and conversations."""
    root = tmp_path_factory.mktemp("tune")
    target = make_target()
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    target = Target.load(str(root / "target"), device="cpu", pack=False)
    asked = ["ab ab ab", "x y", "say it", "and so on"]
    rows = [{"question_id": i, "category": "c", "turns": [text]} for i, text in enumerate(asked)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = tune.TuneOptions(head="h", prompts=str(root / "prompts.jsonl"), max_new_tokens=20)
    options.template = dict  # type: ignore[method-assign]
    texts = tune.calibration_texts(options, target)
    assert all(len(text.ids) - text.supervised.int().argmax() == 20 for text in texts)
    save_head(trained("medusa", target, list(texts), 3), root / "head", {"note": "kept"})
    spoken = [[("user", "ab"), ("assistant", "cd cd cd")], [("user", "x"), ("assistant", "y y y y")]]
    talks = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in spoken]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, talks)))
    return root


def words(folder: Path, *more: str) -> list[str]:
    source = [] if "--data" in more else ["--prompts", str(folder / "prompts.jsonl")]
    return ["tune", "--head", str(folder / "head"), "--max-new-tokens", "20", "--device", "cpu", *source, *more]


@pytest.fixture
def kept(folder: Path) -> Any:
    """The head's files, put back after the test."""
    before = {path: path.read_bytes() for path in (folder / "head").iterdir()}
    yield before
    for path, data in before.items():
        path.write_bytes(data)


def test_the_tree_is_saved_and_the_weights_are_not_touched(
    folder: Path, kept: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    main.main(words(folder, "--nodes", "7"))
    config = json.loads((folder / "head" / "config.json").read_text())
    tree = parse_tree(config["tree"])
    assert isinstance(tree, Static) and tree.nodes == 7 and tree.depth <= OPTIONS["medusa"]["n_heads"]
    before = json.loads(kept[folder / "head" / "config.json"])
    assert before["tree"] == "chain:4" and config == before | {"tree": str(tree)}
    assert (folder / "head" / "model.safetensors").read_bytes() == kept[folder / "head" / "model.safetensors"]
    assert sorted((folder / "head").iterdir()) == sorted(kept), "nothing is left beside them"
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.startswith(("current", "product", "counts"))]
    assert [row[:2] for row in rows] == [["current", "4"], ["product", "7"], ["counts", "7"]]
    assert all(float(row[3]) >= 1 and row[4] == "-" for row in rows)
    assert str(tree) in out and "4 texts, 76 positions" in err

    target = Target.load(str(folder / "target"), device="cpu")
    assert load_head(folder / "head", target).tree == tree


def test_without_nodes_the_speed_model_chooses(
    folder: Path, kept: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = Costs(dict.fromkeys((1, 64), 1.0), 1.0, 0.0, 0.0)  # the widest tree is the fastest
    monkeypatch.setattr(tune, "measure_costs", lambda *_: free)
    main.main(words(folder))
    tree = parse_tree(json.loads((folder / "head" / "config.json").read_text())["tree"])
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("product", "counts"))]
    assert 10 < len(rows) == len({tuple(row) for row in rows}) and [row[-1] for row in rows].count("<-") == 1
    best = max(float(row[4].removeprefix("x")) for row in rows)
    assert float(next(row for row in rows if row[-1] == "<-")[4].removeprefix("x")) == best
    assert tree.nodes > 4

    main.main(words(folder))
    assert parse_tree(json.loads((folder / "head" / "config.json").read_text())["tree"]) == tree, "it was the best"


def test_a_head_whose_tree_is_the_best_keeps_it(
    folder: Path, kept: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dear = Costs({1: 1.0, 2: 50.0, 64: 4000.0}, 1.0, 0.0, 0.0)
    monkeypatch.setattr(tune, "measure_costs", lambda *_: dear)
    config = json.loads(kept[folder / "head" / "config.json"])
    (folder / "head" / "config.json").write_text(json.dumps(config | {"tree": "chain:1"}))
    main.main(words(folder))
    assert json.loads((folder / "head" / "config.json").read_text())["tree"] == "chain:1"
    assert "the current tree chain:1 is no slower and stays; --nodes 1 takes the other" in capsys.readouterr().out


def test_it_measures_for_itself_and_may_only_show(
    folder: Path, kept: dict[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    main.main(words(folder, "--no-save", "--data", str(folder / "data.jsonl")))
    assert (folder / "head" / "config.json").read_bytes() == kept[folder / "head" / "config.json"]
    out, err = capsys.readouterr()
    assert "predicted speed-up" in out and "saved" not in out and "2 texts" in err
    assert f"data: 2 of 2 answers are not marked as written by {folder / 'target'}; the target may not write" in err


def test_conversations_that_the_target_wrote_are_no_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    marks = ["tiny-llama", "another"]
    own = folder / "own.jsonl"
    own.write_text("\n".join(json.dumps(row | {"meta": {"target": m}}) for row, m in zip(rows, marks, strict=True)))
    for limit, told in ((2, "data: 1 of 2 answers are not marked as written by tiny-llama"), (1, "")):
        options = tune.TuneOptions(head="h", data=str(own))
        options.limit = limit  # the other conversation is not used
        options.template = dict  # type: ignore[method-assign]
        assert len(tune.calibration_texts(options, make_target())) == limit
        err = capsys.readouterr().err
        assert told in err if told else err == ""


def test_by_default_it_is_what_the_recipes_keep_out_of_training(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    prepare = tune.prepare
    monkeypatch.setattr(tune, "prepare", lambda whole: prepare(replace(whole, limit=120)))  # the whole takes a while
    options = tune.TuneOptions(head=str(folder / "head"), limit=3, max_new_tokens=4)
    options.template = dict  # type: ignore[method-assign]
    texts = tune.calibration_texts(options, make_target())
    assert len(texts) == 3 and all(int(text.supervised.sum()) == 4 for text in texts), "answered by this target"
    other = make_target()
    other.base = "smollm2-135m"
    own = tune.calibration_texts(options, other)
    assert len(own) == 3 and all(int(text.supervised.sum()) > 4 for text in own), "their own answers"
    answered = [text.ids[: int(text.supervised.int().argmax())].tolist() for text in texts]
    assert all(text.ids[: len(prompt)].tolist() == prompt for text, prompt in zip(own, answered, strict=True))


def test_a_head_is_tuned_on_what_its_own_training_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_tiny(tmp_path)
    changes = {"optim.steps": 1, "data.validation_share": 0.3, "seed": 5, "data.max_length": 40}
    asked = recipe(root, tmp_path / "run", "medusa", **changes)
    head = train(asked)
    target = Target.load(str(root / "target"), device="cpu", pack=False)
    options = tune.TuneOptions(head=str(head))
    texts = tune.calibration_texts(options, target)
    held_out = load_data(asked, target, Ranks(0, 1, target.device)).validation
    assert [text.ids.tolist() for text in texts] == [text.ids.tolist() for text in held_out] != []
    (root / "data.jsonl").rename(root / "elsewhere.jsonl")
    assert tune.held_out_split(read_info(head)) == (DataConfig(), 0)
    assert capsys.readouterr().err.count("warning") == 0, "it saw nothing of the shipped data"
    config = json.loads((head / "config.json").read_text())
    config["meta"]["data"] = ["shipped:data/sample.jsonl", str(root / "data.jsonl")]
    (head / "config.json").write_text(json.dumps(config))
    assert tune.held_out_split(read_info(head)) == (DataConfig(), 0)
    assert "the head was trained on; name others with --data or --prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--nodes", "-1"], "option nodes: must be at least 0 and at most 64, got -1"),
        (["--limit", "1"], "option limit: must be at least 2, got 1"),
        (["--nodes", "65"], "option nodes: must be at least 0 and at most 64, got 65"),
        (["--prompts", "p", "--data", "d"], "option data: cannot be combined with prompts, choose one"),
        (["--prompts", "none.jsonl"], "cannot read the prompts none.jsonl"),
        (["--prompts", str(shipped("eval/prompts/held_out.jsonl"))], "option prompts: eval measures on 40 of"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    more: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as exit_:
        main.main(["tune", "--head", "h", *more])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and message in err and err.count("\n") == 1


def test_a_tree_is_not_chosen_on_documents(folder: Path) -> None:
    (folder / "documents.jsonl").write_text('{"text": "once upon a time"}\n')
    options = tune.TuneOptions(head="h", data=str(folder / "documents.jsonl"))
    with pytest.raises(UserError, match="option data: the data are documents, a tree is chosen on chats"):
        tune.calibration_texts(options, make_target())


def test_a_head_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["tune", "--target", "t"])
    assert "option head: is empty, give the folder of a trained head" in capsys.readouterr().err
    assert len(read_prompts(shipped("eval/prompts/held_out.jsonl"))) == 40
