"""Choosing a tree: rank paths against real drafting, trees against all others, the command against its promises."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spechead.cli import main
from spechead.data.dataset import Sample, collate
from spechead.data.prompts import read_prompts
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import Dynamic, Static, chain, parse_tree
from spechead.evaluation import tune
from spechead.evaluation.tune import Costs, accepted, best_nodes, by_counts, by_product, rank_paths, tokens_per_pass
from spechead.files import shipped
from spechead.heads import HEADS, Head
from spechead.heads.files import load_head, save_head
from spechead.target.model import Target
from spechead.training.build import load_data
from spechead.training.distributed import Ranks
from spechead.training.recipe import DataConfig
from spechead.training.train import train
from tests.helpers.heads import OPTIONS, fit, make_head, sample, step
from tests.helpers.targets import make_target
from tests.helpers.training import recipe, write_tiny

TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))

# ------------------------------------------------------------------------------------------------ trees, by hand

# Two places in five take (0, 0), two (1, 1), one (0, 1); of the last one the text ends.
PATHS = [(0, 0), (0, 0), (1, 1), (1, 1), (0, 1), (0,)]


def test_values_by_hand() -> None:
    product, counts = by_product(PATHS), by_counts(PATHS)
    assert product((0,)) == pytest.approx(4 / 6) and counts((0,)) == pytest.approx(4 / 6)
    assert product((0, 0)) == pytest.approx(4 / 6 * 2 / 5), "two of the five places that have a second token"
    assert product((1, 0)) == pytest.approx(2 / 6 * 2 / 5), "as if depths were independent"
    assert counts((0, 0)) == counts((1, 1)) == pytest.approx(2 / 6)
    assert counts((1, 0)) == 0, "it never was"
    assert product((7,)) == counts((7,)) == 0


def test_the_two_methods_choose_by_their_own_values() -> None:
    assert best_nodes(by_product(PATHS), 4, 2) == [(0,), (0, 1), (1,), (0, 0)]  # 0.67, 0.40, 0.33, 0.27
    assert best_nodes(by_counts(PATHS), 4, 2) == [(0,), (1,), (0, 0), (1, 1)]  # 0.67, then 0.33 each
    assert best_nodes(by_counts(PATHS), 9, 2) == [(0,), (1,), (0, 0), (1, 1), (0, 1)], "the rest is worth nothing"
    assert best_nodes(by_counts(PATHS), 9, 1) == [(0,), (1,)]
    assert best_nodes(by_counts([]), 3, 3) == []


def test_a_tree_accepts_what_it_holds_of_a_path() -> None:
    nodes = set(TREE.choices)
    assert [accepted(nodes, path) for path in [(0, 0, 0, 0), (1, 0, 0), (1, 1), (3,), (), (tune.OUTSIDE, 0)]] == [
        *(3, 2, 1, 0, 0, 0)
    ]


def test_passes_begin_where_the_last_one_ended() -> None:
    assert tokens_per_pass([[2, 9, 9, 0, 1]]) == pytest.approx(5 / 3)  # 3 tokens, then 1, then the last one of two
    assert tokens_per_pass([[0, 0], [1, 0]]) == pytest.approx(4 / 3)
    assert tokens_per_pass([[0, 0, 0]]) == 1.0


paths = st.lists(st.lists(st.integers(-1, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


@given(paths, st.integers(1, 5), st.integers(1, 3))
def test_no_tree_of_that_size_accepts_more(found: list[tuple[int, ...]], nodes: int, depth: int) -> None:
    """By counts: among all trees of ranks 0 to 2, the mean number of accepted drafts is the greatest."""
    every = [path for d in range(1, depth + 1) for path in itertools.product(range(3), repeat=d)]
    every = [path for path in every if by_counts(found)(path) > 0]
    best = 0
    for size in range(min(nodes, len(every)) + 1):
        for tree in map(set, itertools.combinations(every, size)):
            if all(len(path) == 1 or path[:-1] in tree for path in tree):
                best = max(best, sum(accepted(tree, path) for path in found))
    chosen = best_nodes(by_counts(found), nodes, depth)
    assert sum(accepted(set(chosen), path) for path in found) == best
    assert sum(map(by_counts(found), chosen)) == pytest.approx(best / len(found)), "the value is what is accepted"


@given(paths, st.integers(1, 12), st.integers(1, 3), st.sampled_from([by_product, by_counts]))
def test_chosen_nodes_are_a_tree_and_grow(found: list[tuple[int, ...]], nodes: int, depth: int, method: Any) -> None:
    chosen = best_nodes(method(found), nodes, depth)
    values = list(map(method(found), chosen))
    assert values == sorted(values, reverse=True)
    assert all(len(path) <= depth and path[:-1] in [(), *chosen[:i]] for i, path in enumerate(chosen))
    assert best_nodes(method(found), nodes - 1, depth) == chosen[: nodes - 1]
    if chosen:
        Static(tuple(chosen))


# ------------------------------------------------------------------------------------------------ rank paths


def trained(kind: str, target: Target, texts: list[Sample], steps: int = 40) -> Head:
    head = make_head(kind, target)
    fit(head, collate(texts, 256), steps)
    return head.eval()


@pytest.mark.parametrize("kind", HEADS)
def test_rank_paths_tell_what_real_drafting_has_accepted(kind: str, target: Target) -> None:
    texts = [sample(target, 24, seed) for seed in (3, 4)]
    head = trained(kind, target, texts)
    answers = rank_paths(head, texts, 3)
    assert [len(answer) for answer in answers] == [23, 23]
    for plan in (chain(3), TREE):
        head.tree = plan
        foretold = [[accepted(set(plan.choices), path) for path in answer] for answer in answers]
        assert foretold == tune.accepted_now(head, texts), "place by place"
        runs = [
            generate(target, text.ids[:8].tolist(), head, speculation=Speculation(plan), max_new_tokens=24).stats
            for text in texts
        ]
        assert tokens_per_pass(foretold) == sum(run.tokens for run in runs) / sum(run.passes for run in runs)
        assert tokens_per_pass(foretold) > 1.05
    head.tree = Dynamic(nodes=9, depth=3, topk=4)
    runs = [generate(target, text.ids[:8].tolist(), head, max_new_tokens=24).stats for text in texts]
    now = tune.accepted_now(head, texts)
    assert tokens_per_pass(now) == sum(run.tokens for run in runs) / sum(run.passes for run in runs)


@pytest.mark.parametrize("kind", HEADS)
def test_what_training_counts_as_right_is_what_drafting_ranks_first(kind: str, target: Target) -> None:
    text = sample(target, 24)
    head = trained(kind, target, [text])
    hits = step(head, collate([text], 64)).hits
    [answer, _] = rank_paths(head, [text, text], head.scored_depth)
    right = 0
    for row, path in enumerate(answer, start=7):  # the root of the first pass is token 8, the answer's first
        for depth, rank in enumerate(path):
            assert (rank == 0) == bool(hits.correct[depth, 0, row]), (row, depth)
            right += rank == 0
    assert 10 < right < sum(map(len, answer))


def test_a_token_outside_the_draft_vocabulary_ends_the_path(target: Target) -> None:
    head = make_head("medusa", target)
    ids = torch.tensor([4, 6, 8, 10, 7, 12, 14])  # only even tokens can be drafted
    [answer, _] = rank_paths(head, [Sample(ids, torch.arange(7) >= 2, 0)] * 2, 3)
    assert [[rank == tune.OUTSIDE for rank in path] for path in answer] == [
        [False, True],
        [True],
        [False, False],
        [False],
    ]


def test_answers_of_two_turns_are_two(target: Target) -> None:
    text = Sample(torch.arange(5, 15), torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=torch.bool), 0)
    assert tune.answer_spans(text) == [(1, 4), (6, 8), (9, 10)]
    head = make_head("eagle3", target, draft_vocab_size=0)
    answers = rank_paths(head, [text], 3)
    assert [list(map(len, answer)) for answer in answers] == [[2, 1], [1]], "one token alone begins no pass"


# ------------------------------------------------------------------------------------------------ choosing


def test_a_tree_is_judged_on_answers_that_it_was_not_chosen_on() -> None:
    answers = [[(0, 0)] * 8, [(1, 1)] * 8]
    [found] = tune.best_trees("counts", answers, [2], 2, None)
    assert found.tokens == 1.0, "what one half teaches helps nothing in the other"
    answers *= 2
    [found] = tune.best_trees("counts", [answers[0], answers[0], answers[1], answers[1]], [4], 2, None)
    assert found.tokens == pytest.approx(8 / 3) and len(found.plan.choices) == 4  # type: ignore[union-attr]


def test_trees_of_several_sizes_are_those_of_each_and_cost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[(0, 0), (1, 1), (0, 1)], [(0, 0, 0), (1, 0)], [(0,), (2, 1)], [(1, 1), (0, 0)]]
    sizes = [1, 2, 4, 7]
    one_by_one = [tune.best_trees("counts", answers, [size], 3, None)[0] for size in sizes]
    valued, built = [], []
    counted, chosen = tune.by_counts, tune.best_nodes
    monkeypatch.setitem(tune.METHODS, "counts", lambda paths: (valued.append(paths), counted(paths))[1])
    monkeypatch.setattr(tune, "best_nodes", lambda *words: (built.append(words[1:]), chosen(*words))[1])
    assert tune.best_trees("counts", answers, sizes, 3, None) == one_by_one
    assert len(valued) == 3 and built == [(7, depth) for depth in (1, 2, 3) for _ in range(3)]


def test_costs_decide_the_depth() -> None:
    answers = [[(0, 0)] * 9, [(0, 0)] * 9]
    cheap, dear = (Costs({1: 1.0, 4: 1.3}, 0.9, step, 0.1) for step in (0.0, 2.0))
    assert tune.best_trees("counts", answers, [3], 2, cheap)[0].plan == chain(2)
    assert tune.best_trees("counts", answers, [3], 2, dear)[0].plan == chain(1)
    assert cheap.speedup(3.0, chain(2)) == pytest.approx(3 / (0.9 * 1.2 + 0.1)), "v of 3 tokens lies on the line"
    assert dear.speedup(3.0, chain(2)) == pytest.approx(3 / (0.9 * 1.2 + 2 * 2.0 + 0.1))


def test_measured_costs_are_those_of_the_speed_model(target: Target) -> None:
    texts = [sample(target, 24, seed) for seed in (3, 4)]
    costs = tune.measure_costs(make_head("medusa", target), texts, 3)
    assert list(costs.v)[:3] == [1, 2, 3] and costs.v[1] == 1.0
    assert 0 < costs.plain_verify < 1 and costs.step > 0 and costs.rest > 0


# ------------------------------------------------------------------------------------------------ the command


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
    save_head(trained("medusa", target, texts, 3), root / "head", {"note": "kept"})
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
    assert isinstance(tree, Static) and tree.nodes == 7 and tree.depth <= OPTIONS["medusa"]["n_heads"]  # type: ignore[operator]
    before = json.loads(kept[folder / "head" / "config.json"])
    assert before["tree"] == "chain:4" and config == before | {"tree": str(tree)}
    assert (folder / "head" / "model.safetensors").read_bytes() == kept[folder / "head" / "model.safetensors"]
    assert sorted((folder / "head").iterdir()) == sorted(kept), "nothing is left beside them"
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.startswith(("current", "product", "counts"))]
    assert [row[:2] for row in rows] == [["current", "4"], ["product", "7"], ["counts", "7"]]
    assert all(float(row[3]) >= 1 and row[4] == "-" for row in rows)
    assert str(tree) in out and "4 texts, 76 places" in err

    target = Target.load(str(folder / "target"), device="cpu")
    assert load_head(folder / "head", target).tree == tree


def test_without_nodes_the_speed_model_chooses(
    folder: Path, kept: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = Costs({size: 1.0 for size in (1, 64)}, 1.0, 0.0, 0.0)  # the widest tree is the fastest
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
    assert f"data: 2 of 2 answers are not marked as written by {folder / 'target'}; the tree is chosen for" in err


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
    read = tune.read_conversations
    monkeypatch.setattr(tune, "read_conversations", lambda source, _: read(source, 120))  # the whole takes a while
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
    assert tune.split_of(head) == (DataConfig(), 0)
    assert capsys.readouterr().err.count("warning") == 0, "it saw nothing of the shipped data"
    config = json.loads((head / "config.json").read_text())
    config["meta"]["data"] = ["shipped:data/sample.jsonl", str(root / "data.jsonl")]
    (head / "config.json").write_text(json.dumps(config))
    assert tune.split_of(head) == (DataConfig(), 0)
    assert "it learned from some; name others with --data or --prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--nodes", "-1"], "option nodes: must be at least 0, got -1"),
        (["--limit", "1"], "option limit: must be at least 2, got 1"),
        (["--nodes", "65"], "options nodes and depth: at most 64"),
        (["--prompts", "p", "--data", "d"], "prompts and data are both given: choose one"),
        (["--prompts", "none.jsonl"], "cannot read the prompts none.jsonl"),
        (["--prompts", str(shipped("eval/prompts/held_out.jsonl"))], "eval measures on 40 of them"),
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


def test_a_head_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["tune", "--target", "t"])
    assert "no head: give --head" in capsys.readouterr().err
    assert len(read_prompts(shipped("eval/prompts/held_out.jsonl"))) == 40


def test_a_head_that_is_never_right_gets_no_tree() -> None:
    with pytest.raises(tune.UserError, match="drafts no token of these texts right"):
        tune.best_trees("product", [[(-1,), (-1,)], [(-1,)]], [3], 2, None)
