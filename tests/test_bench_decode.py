"""The benchmark: its arithmetic on runs made by hand, its settings, then the script on a tiny target."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from spechead.cli import one_line_errors
from spechead.errors import UserError
from spechead.formats.native import save_head
from spechead.generate import Stats
from spechead.heads import HEADS
from spechead.target import Target
from spechead.tree import chain

SCRIPT = Path(__file__).parents[1] / "eval" / "bench_decode.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_decode", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_decode"] = module  # where dataclasses look for their own module
    spec.loader.exec_module(module)
    return module


bench = load_script()


# --------------------------------------------------------------------------------------- numbers, by hand


def run(seconds: float, tokens: Sequence[int], passes: int = 0, spent: Sequence[float] = ()) -> Any:
    """`spent`: seconds of draft, verify, commit, other; without passes a run of generate."""
    if not passes:
        return bench.Run(list(tokens), seconds)
    phases = dict(zip(("draft", "verify", "commit", "other"), spent, strict=True))
    return bench.Run(list(tokens), seconds, Stats(passes, len(tokens) - 1, seconds={"prefill": 100.0} | phases))


LONG, SHORT = [5, 6, 7, 8, 9], [5, 6, 7]
RUNS = {
    "plain": [
        run(5.0, LONG, 4, (0.0, 3.0, 0.5, 0.5)),
        run(6.0, SHORT, 2, (0.0, 3.0, 0.5, 0.5)),
        run(9.0, SHORT, 2, (0.0, 2.0, 0.0, 2.0)),
    ],
    "generate": [run(10.0, LONG), run(3.0, SHORT), run(6.0, SHORT)],  # plain / generate: 0.5, 2, 1.5
    "prompt_lookup": [
        run(2.5, LONG, 1, (1.0, 2.0, 0.5, 0.5)),  # outside: 0.25; speed-up 2
        run(6.0, SHORT, 2, (1.0, 2.0, 0.5, 0.5)),  # speed-up 1
        run(3.0, SHORT, 1, (0.0, 1.0, 1.0, 0.0)),  # outside: 0.5; speed-up 3
    ],
    "generate, prompt_lookup": [run(5.0, LONG), run(3.0, [5, 6, 8]), run(6.0, SHORT)],  # 0.5, 2, 0.5
    "head": [
        run(5.0, LONG, 4, (1.0, 2.0, 1.0, 0.0)),
        run(2.0, [5], 0),  # an answer of one token has no pass
        run(4.5, SHORT, 1, (1.0, 2.0, 1.0, 1.0)),  # outside: 0.4
    ],
}


def test_ratios_are_medians_over_the_prompts() -> None:
    found = bench.numbers(RUNS)
    assert found["plain_over_generate"] == 1.5
    assert found["lookup_over_generate_lookup"] == 0.5
    assert found["over_generate"] == {"prompt_lookup": 0.5}
    assert found["drafters"]["prompt_lookup"] == {
        "acceptance_length": 2.0,  # (4 + 2 + 2) tokens in (1 + 2 + 1) passes: pooled, not a mean of means
        "seconds_per_token": 1.0,  # of 0.5, 2, 1
        "speedup": 2.0,
    }
    assert list(found["drafters"]) == ["prompt_lookup", "head"]
    assert found["decoders"]["plain"]["speedup"] == 1.0 and found["decoders"]["plain"]["acceptance_length"] == 1.0
    assert found["decoders"]["generate"]["acceptance_length"] is found["decoders"]["generate"]["overhead_share"] is None


def test_overhead_is_the_worst_drafters_and_leaves_the_prefill_out() -> None:
    found = bench.numbers(RUNS)
    shares = {name: row["overhead_share"] for name, row in found["decoders"].items()}
    assert shares["plain"] == shares["prompt_lookup"] == 0.25
    assert shares["head"] == pytest.approx((0.25 + 0.4) / 2)
    assert found["overhead_share"] == shares["head"]


def test_texts_that_differ_from_plain_decodings_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.numbers(RUNS)
    assert {name: row["texts"]["equal"] for name, row in found["decoders"].items()} == {
        "plain": 3,
        "generate": 3,
        "prompt_lookup": 3,
        "generate, prompt_lookup": 2,
        "head": 2,
    }
    assert found["texts"] == {"checked": 12, "equal": 10}
    bench.show(found | {"v": {"1": 1.0, "4": 1.25}, "v_past": 80})
    shown = capsys.readouterr().out
    assert "NOT LOSSLESS: 10 of 12 texts" in shown and "1.25" in shown and "behind 80 tokens" in shown


def test_modes_take_turns_in_a_rotating_order_after_a_warm_up() -> None:
    calls: list[tuple[str, int]] = []

    def mode(name: str) -> Any:
        def decode(question: Any) -> Any:
            calls.append((name, question.cap))
            return run(1.0, LONG, 4, (0, 1, 0, 0))

        return decode

    names = ["plain", "b", "c"]
    runs = bench.measure({name: mode(name) for name in names}, [bench.Question([1], cap) for cap in (90, 91, 92, 93)])
    assert calls[:3] == [("plain", 32), ("b", 32), ("c", 32)]
    assert [name for name, _ in calls[3:]] == [*names, "b", "c", "plain", "c", "plain", "b", *names]
    assert [cap for _, cap in calls[3:]] == [90] * 3 + [91] * 3 + [92] * 3 + [93] * 3
    assert [len(found) for found in runs.values()] == [4, 4, 4]


def test_answers_without_a_pass_cannot_be_measured() -> None:
    with pytest.raises(UserError, match="every answer ended with its first token"):
        bench.measure({"plain": lambda _: run(1.0, [2])}, [bench.Question([1], 9)])


# ---------------------------------------------------------------------------------------- equal settings


def test_both_prompt_lookups_draft_the_same(target: Target) -> None:
    options = bench.BenchOptions(draft_tokens=3, ngram=2)
    lookup, plan = bench.decoders(target, options)["prompt_lookup"].args[1:]
    settings = bench.lookup_settings(options)
    like = PromptLookupCandidateGenerator(
        num_output_tokens=settings["prompt_lookup_num_tokens"],
        max_matching_ngram_size=settings["max_matching_ngram_size"],
        max_length=99,
    )
    generator = torch.Generator().manual_seed(0)
    drafted = 0
    for _ in range(40):
        text = torch.randint(5, 9, (12,), generator=generator)
        state = lookup.new_state(text[:-1])
        tree = lookup.propose(state, text[1:], None, plan)
        theirs = like.get_candidates(text[None])[0][0, len(text) :]
        assert tree.tokens[1:].tolist() == theirs.tolist()
        drafted += len(theirs)
    assert drafted > 80


def test_the_assistant_of_generate_drafts_as_many_tokens_as_asked_whatever_happens(target: Target) -> None:
    draft = make_target(seed=1)
    settings = bench.assistant_settings(target, draft, bench.BenchOptions(draft_tokens=7))
    config = settings["assistant_model"].generation_config
    assert settings == {"assistant_model": draft.model}
    assert (config.num_assistant_tokens, config.num_assistant_tokens_schedule) == (7, "constant")
    assert config.assistant_confidence_threshold == 0


@pytest.mark.parametrize(("text", "plan"), [("self:0-3 chain:2", chain(2)), ("self:0-3", None)])
def test_a_drafter_may_bring_its_tree(target: Target, text: str, plan: Any) -> None:
    drafter, found = bench.named_drafter(text, target)
    assert drafter.draft.n_layers == 4 and found == plan


# ------------------------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a head for it, and prompts."""
    root = tmp_path_factory.mktemp("bench")
    target = make_target()
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    loaded = Target.load(str(root / "target"), device="cpu", pack=False)
    head = HEADS["eagle3"](HEADS["eagle3"].Config(layers=[1, 3, 5]), loaded)
    save_head(head, root / "head", {})
    rows = [{"question_id": i, "category": "c", "turns": [text]} for i, text in enumerate(["ab ab ab", "x y"])]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def test_the_script_writes_and_prints_every_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    bench.main(
        [
            *("--head", "head", "--tree", "chain:2", "--tree", "static:[[0],[1],[0,0]]", "--draft-model", "target"),
            *(
                "--drafter",
                "self:0-3 chain:2",
                "--drafter",
                "prompt_lookup",
                "--drafter",
                "staged:self:0-2+prompt_lookup",
            ),
            *("--target", "target", "--prompts", "prompts.jsonl", "--max-new-tokens", "11", "--draft-tokens", "4"),
            *("--json", "out/bench.json"),
        ]
    )
    found = json.loads((folder / "out" / "bench.json").read_text())
    for name in ("plain_over_generate", "lookup_over_generate_lookup", "overhead_share"):
        assert isinstance(found[name], float) and math.isfinite(found[name])
    assert 0 <= found["overhead_share"] < 1
    assert list(found["v"]) == ["1", "2", "3", "4", "6", "8", "12", "16", "24", "32", "48", "64"]
    assert found["v"]["1"] == 1.0 and all(isinstance(value, float) and value > 0 for value in found["v"].values())
    assert list(found["drafters"]) == [
        "prompt_lookup",
        "draft_model:target",
        "self:0-3 chain:2",
        "staged:self:0-2+prompt_lookup",
        "eagle3 chain:2",
        "eagle3 static:[[0],[1],[0,0]]",
    ]
    for entry in found["drafters"].values():
        assert set(entry) == {"acceptance_length", "seconds_per_token", "speedup"}
        assert all(isinstance(value, float) and value > 0 for value in entry.values())
        assert entry["acceptance_length"] >= 1
    assert found["drafters"]["draft_model:target"]["acceptance_length"] == 5.0  # 10 tokens in 2 passes, all accepted
    others = len(found["decoders"]) - 1
    assert others == len(found["drafters"]) + 3  # generate plain, with look-up, with the assistant
    assert found["texts"] == {"checked": 2 * others, "equal": 2 * others}
    assert found["settings"]["draft_tokens"] == 4 and found["machine"]["threads"] == 1

    shown = capsys.readouterr().out
    assert "NOT LOSSLESS" not in shown and "v(n)" in shown
    assert all(name in shown for name in found["decoders"])


def test_a_target_of_few_positions_is_measured_as_far_as_it_goes(folder: Path) -> None:
    target = make_target()
    target.max_positions = 30
    past, v = bench.passes_by_size(target, [bench.Question(list(range(5, 25)), 6)], [run(1.0, LONG)])
    assert list(v) == ["1", "2", "3", "4", "6", "8", "12", "16", "24"] and past == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-tokens", "0"], "draft_tokens 0: must be 1 or more"),
        (["--max-new-tokens", "1"], "max_new_tokens 1: must be 2 or more"),
        (["--limit", "-1"], "limit -1: must be 0 or more"),
        (["--tree", "chain:3"], "tree chain:3: is for a head; give --head, or write --drafter 'NAME TREE'"),
        (["--head", "nowhere", "--tree", "bush:3"], "tree 'bush:3' is not understood"),
        (["--head", "nowhere"], "no head at nowhere"),
        (["--json", "."], "json .: is a folder, a file is expected"),
        (["--drafters", "x"], "unknown option drafters (did you mean drafter?)"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        bench.main(flags)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"spechead: error: {message}") and error.count("\n") == 1


def test_a_prompt_too_long_for_the_target_is_named(folder: Path, target: Target, monkeypatch: Any) -> None:
    monkeypatch.setattr(target, "max_positions", 20)
    with pytest.raises(UserError, match=r"prompt 0 has \d+ tokens: too long for the 20 positions of tiny-llama"):
        bench.prepare(target, bench.BenchOptions(prompts=str(folder / "prompts.jsonl")))
