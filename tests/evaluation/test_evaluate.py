"""The measurement: order and warm-up with a scripted decoder and clock, then decoding on a tiny target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead.cli import main
from spechead.data.chat import prompt_ids
from spechead.decoding.generate import Generation, Stats, generate
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import chain, parse_tree
from spechead.errors import UserError
from spechead.evaluation import evaluate, measure, page
from spechead.evaluation import options as decoding
from spechead.evaluation.evaluate import EvalOptions
from spechead.heads import HEADS
from spechead.heads.files import HeadInfo, save_head
from spechead.target.loading import native_bfloat16
from spechead.target.model import Target
from tests.helpers.drafters import Scripted
from tests.helpers.targets import make_target

ROWS = [("a", "one and two"), ("b", "three?"), ("a", "five, six"), ("b", "seven eight")]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "few.jsonl"
    lines = [json.dumps({"question_id": i, "category": c, "turns": [t]}) for i, (c, t) in enumerate(ROWS, 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def encoded(target: Target, text: str) -> list[int]:
    return prompt_ids(target.tokenizer, [{"role": "user", "content": text}])


class Knowing(Scripted):
    """Scripted drafts for several prompts: knows each one's plain text."""

    kind = "scripted"

    def __init__(self, target: Target, right: int, sampling: tuple[float, int] = (0.0, 0)) -> None:
        super().__init__([], right, chain(3))
        self.texts: dict[tuple[int, ...], list[int]] = {}
        temperature, seed = sampling
        for index, (_, text) in enumerate(ROWS):
            ids = encoded(target, text)
            sampler = Sampler(temperature, seed=seed + index)
            self.texts[tuple(ids)] = generate(target, ids, max_new_tokens=60, sampler=sampler).tokens

    def new_state(self, prompt: torch.Tensor) -> dict[str, int]:
        self.text = self.texts[tuple(prompt.tolist())]
        return {"seen": 0}


Use = Callable[[Any], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, target: Target) -> Use:
    """Let `evaluate` find the tiny target and the head it is given."""

    def install(head: Any) -> None:
        monkeypatch.setattr(Target, "load", classmethod(lambda cls, name, **_: target))
        monkeypatch.setattr(decoding, "load_head", lambda *_, **__: head)
        monkeypatch.setattr(decoding, "read_info", lambda folder: HeadInfo(folder, target="tiny-llama"))
        monkeypatch.setattr(evaluate, "write_html", lambda *_: None)  # drawing takes longer than decoding here

    return install


def options(file: Path, **more: Any) -> EvalOptions:
    settings: dict[str, Any] = {"head": "h", "prompts": str(file), "max_new_tokens": 24, "generate_prompts": 0}
    return EvalOptions(**settings | {"out": str(file.parent / "out")} | more)


def alone(file: Path, *drafters: str, **more: Any) -> EvalOptions:
    return options(file, head="", target="tiny", drafter=list(drafters), **more)


# ---------------------------------------------------------------------------------------- scripted decoding


class FakeDecoder:
    """Stands for `generate`: 10 tokens an answer, 1 s a token, 0.5 s with drafts; notes its calls."""

    def __init__(self, differs: Sequence[int] = ()) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []
        self.differs = differs  # indices of speculative calls whose fourth token is another
        self.speculative = 0

    def perf_counter(self) -> float:
        return self.now

    def __call__(
        self, target: Target, prompt: Sequence[int], drafter: Any = None, *, speculation: Any = None, **more: Any
    ) -> Generation:
        named = type(drafter).__name__ + " " if not isinstance(drafter, Scripted) else ""
        count = min(10, more["max_new_tokens"])
        tokens, gaps = list(range(count)), [i / 10 for i in range(count)] if more.get("keep_gaps") else []
        self.calls.append(
            (f"{named}{speculation.tree}" if drafter else "gaps" if gaps else "plain", more["max_new_tokens"])
        )
        self.now += count * (0.5 if drafter else 1.0)
        if drafter:
            tokens[3] = 99 if self.speculative in self.differs else 3
            self.speculative += 1
            more["on_commit"](tokens[:1], 0)
            more["on_commit"](tokens[1:4], 2)
            more["on_commit"](tokens[4:], 2)
        step = 3 if drafter else 1
        passes = (count - 1) // step
        drafted, accepted = ([3] * passes, [2] * passes) if drafter else ([0] * passes, [0] * passes)
        spent = {"prefill": 0.0, "draft": 1.0, "verify": 3.0, "commit": 0.5, "other": 0.5}
        stats = Stats(passes, passes * step, [step] * passes, drafted, accepted, spent)
        return Generation(tokens, "length", stats, gaps)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, use: Use) -> FakeDecoder:
    decoder = FakeDecoder()
    head = Scripted([], 0, chain(3))
    head.kind = "scripted"  # type: ignore[attr-defined]
    use(head)
    monkeypatch.setattr(evaluate, "generate", decoder)
    monkeypatch.setattr(measure, "generate", decoder)
    monkeypatch.setattr(measure.time, "perf_counter", decoder.perf_counter)
    monkeypatch.setattr(measure, "verify_costs", lambda _, sizes: [1.5 for _ in sizes])
    return decoder


def test_modes_are_interleaved_in_alternating_order_after_a_warm_up(prompts: Path, fake: FakeDecoder) -> None:
    evaluate.evaluate(options(prompts, tree=["chain:3", "chain:2"], max_new_tokens=50))
    modes = ["plain", "chain:3", "chain:2"]
    assert fake.calls[:3] == [(mode, measure.WARM_UP_TOKENS) for mode in modes]
    expected = [*modes, *reversed(modes), *modes, *reversed(modes)]
    assert fake.calls[3:] == [(mode, 50) for mode in expected]


def test_drafters_are_measured_beside_the_head_in_the_same_turns(prompts: Path, fake: FakeDecoder) -> None:
    drafters = ["prompt_lookup", "self:0-3", "staged:self:0-3+prompt_lookup"]
    report = evaluate.evaluate(options(prompts, drafter=drafters, limit=2))
    modes = ["plain", "chain:3", "PromptLookup chain:10", "SelfSpeculative chain:4", "Staged chain:4"]
    assert [mode for mode, _ in fake.calls] == [*modes, *modes, *reversed(modes)]
    assert list(report["suites"]) == ["few", "few/a", "few/b", *(f"few@{drafter}" for drafter in drafters)]
    assert [entry["drafter"] for entry in report["suites"].values()] == ["scripted"] * 3 + drafters
    assert [(row["drafter"], row["prompt"]) for row in report["runs"]] == [
        (drafter, prompt) for drafter in ("scripted", *drafters) for prompt in (1, 2)
    ]
    assert (report["head"], report["kind"]) == ("h", "scripted")
    assert report["settings"]["drafter"] == drafters
    assert report["settings"]["tree"] == ["chain:3", "chain:10", "chain:4"]
    assert report["settings"]["draft_dtype"] == ("bfloat16" if native_bfloat16(torch.device("cpu")) else "float32")


def test_trees_are_for_all_drafters_that_can_draft_them(prompts: Path, fake: FakeDecoder) -> None:
    trees = ["static:[[0],[1]]", "chain:2"]
    report = evaluate.evaluate(options(prompts, drafter=["prompt_lookup", "self:0-3"], tree=trees, limit=1))
    wholes = {name: entry["tree"] for name, entry in report["suites"].items() if "/" not in name}
    assert wholes == {
        "few": trees[0],
        "few@chain:2": "chain:2",
        "few@prompt_lookup chain:2": "chain:2",
        "few@self:0-3 static:[[0],[1]]": trees[0],
        "few@self:0-3 chain:2": "chain:2",
    }
    report = evaluate.evaluate(options(prompts, drafter=["prompt_lookup"], tree=trees[:1], limit=1))
    assert report["suites"]["few@prompt_lookup"]["tree"] == "chain:10", "its own, as none of these is a chain"


def test_the_first_drafter_is_the_main_one_where_there_is_no_head(
    prompts: Path, fake: FakeDecoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompts.parent)
    report = evaluate.evaluate(alone(prompts, "self:0-3", "prompt_lookup", "self:0-3", out=""))
    assert (report["head"], report["kind"]) == ("", "self:0-3")
    assert list(report["suites"]) == ["few", "few/a", "few/b", "few@prompt_lookup"]
    assert report["suites"]["few"]["drafter"] == "self:0-3"
    assert "self:0-3 on tiny-llama, float32" in capsys.readouterr().out
    assert (prompts.parent / "runs" / "eval" / "report.json").exists()


def test_numbers_of_a_scripted_measurement(prompts: Path, fake: FakeDecoder) -> None:
    report = evaluate.evaluate(options(prompts, tree=["chain:3", "static:[[0],[1]]"]))
    assert list(report["suites"]) == ["few", "few/a", "few/b", "few@static:[[0],[1]]"]
    entry = report["suites"]["few"]
    assert (entry["prompts"], entry["passes"], entry["tokens"]) == (4, 12, 36)
    assert entry["acceptance_length"] == 3.0 and entry["survival"] == [1, 1, 0]
    assert entry["speedup"] == entry["speedup_macro"] == 2.0 and entry["speedup_ci"] == [2.0, 2.0]
    assert entry["plain_tokens_per_s"] == 1.0 and entry["speculative_tokens_per_s"] == 2.0
    assert entry["generate_ratio"] is None
    assert entry["lossless"] == {"checked": 4, "equal": 4, "divergences": []}
    assert entry["predicted"]["v"] == 1.5
    assert [row["prompt"] for row in report["runs"]] == [1, 2, 3, 4] * 2
    assert [example["category"] for example in report["examples"]] == ["a", "b"]
    depths = [depth for _, depth in report["examples"][0]["pieces"]]
    assert depths.count(1) == depths.count(2) and max(depths) == 2


def test_what_is_not_applied_of_the_generation_config_is_named(
    prompts: Path,
    fake: FakeDecoder,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate.evaluate(options(prompts))["settings"]["ignored_generation"] == {}
    assert "not applied" not in capsys.readouterr().err
    monkeypatch.setattr(target, "ignored_generation", {"top_k": 20, "num_beams": 3})
    report = evaluate.evaluate(options(prompts))
    assert report["settings"]["ignored_generation"] == {"top_k": 20, "num_beams": 3}
    assert "generation config of tiny-llama, in no decoding: top_k=20, num_beams=3;" in capsys.readouterr().err


def test_a_difference_is_reported_with_the_gap_of_plain_decoding(
    prompts: Path, fake: FakeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.differs = [3]  # the warm-up is call 0: this is the third prompt
    report = evaluate.evaluate(options(prompts))
    assert report["suites"]["few"]["lossless"] == {
        "checked": 4,
        "equal": 3,
        "divergences": [
            {"prompt": 3, "position": 3, "plain_token": 3, "speculative_token": 99, "gap": pytest.approx(0.3)}
        ],
    }
    assert report["suites"]["few/b"]["lossless"]["equal"] == 2
    assert fake.calls[-1][0] == "gaps"  # outside the clock
    assert report["suites"]["few"]["speedup"] == 2.0
    assert "NOT LOSSLESS" in capsys.readouterr().out


def test_a_failing_prompt_ends_the_measurement_and_nothing_is_written(
    prompts: Path, fake: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **more: Any) -> Generation:
        if len(fake.calls) == 5:
            raise RuntimeError("out of memory")
        return fake(*args, **more)

    monkeypatch.setattr(measure, "generate", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate.evaluate(options(prompts))
    assert list((prompts.parent / "out").iterdir()) == []


def test_limit_takes_prompts_of_every_kind(prompts: Path, fake: FakeDecoder) -> None:
    report = evaluate.evaluate(options(prompts, limit=2))
    assert [row["prompt"] for row in report["runs"]] == [1, 2]


def test_answers_are_cut_to_the_positions_of_the_target(
    prompts: Path, fake: FakeDecoder, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(encoded(target, text)) for _, text in ROWS)
    monkeypatch.setattr(target, "max_positions", longest + 9)
    evaluate.evaluate(options(prompts))
    assert {count for _, count in fake.calls[2:]} == {
        min(24, longest + 9 - len(encoded(target, text))) for _, text in ROWS
    }
    monkeypatch.setattr(target, "max_positions", longest + 1)
    with pytest.raises(UserError, match=rf"prompt \d has {longest} tokens.*'tiny-llama'.* {longest + 1} positions"):
        evaluate.evaluate(options(prompts))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": "nowhere.jsonl"}, "cannot read the prompts nowhere.jsonl"),
        ({"tree": ["bush:3"]}, "bush:3"),
        ({"limit": -1}, "option limit: must be at least 0, got -1"),
        ({"generate_prompts": -2}, "option generate_prompts: must be at least 0, got -2"),
        ({"max_new_tokens": 1}, "option max_new_tokens: must be at least 2, got 1"),
        ({"temperature": -1.0}, "option temperature: must be at least 0, got -1.0"),
        ({"draft_dtype": "int8"}, "option draft_dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        ({"drafter": ["self:0-3", "prompt_look"]}, "option drafter: 'prompt_look' is not a drafter"),
        (
            {"rule": "block", "tree": ["chain:2", "static:[[0],[1]]"], "draft_temperature": 1.0},
            r"option rule: block needs a chain, not static:\[\[0\],\[1\]\]",
        ),
        ({"rule": "hope"}, "option rule: must be one of exact_match, rejection, block, typical, got 'hope'"),
        ({"rule": "rejection"}, "option rule: rejection needs sampled drafts; set draft_temperature above 0"),
        ({"tree": ["chain:2", "dynamic:nodes=8,depth=4,topk=3"], "draft_temperature": 1.0}, "cannot sample its drafts"),
        ({"head": ""}, "option target: is empty; give --target, or --head"),
        ({"head": "", "drafter": ["prompt_lookup"]}, "option target: is empty; give --target, or --head"),
        ({"head": "", "target": "tiny"}, "option drafter: nothing to measure; give --head, --drafter or both"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    prompts: Path, fake: FakeDecoder, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(decoding, "read_info", lambda _: pytest.fail("loaded"))
    with pytest.raises(UserError, match=message):
        evaluate.evaluate(options(prompts, **more))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    prompts: Path, fake: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "read_info", lambda _: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"few\.jsonl"):
        evaluate.evaluate(options(prompts, out=str(prompts / "below")))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"drafter": ["self:0-9"]}, "'tiny-llama' has layers 0-6, not 9"),
        ({"drafter": ["self:0-3", "prompt_lookup"], "draft_temperature": 1.0}, "prompt_lookup cannot sample"),
    ],
)
def test_a_drafter_that_does_not_fit_is_named(prompts: Path, use: Use, more: dict[str, Any], message: str) -> None:
    use(None)
    with pytest.raises(UserError, match=message):
        evaluate.evaluate(options(prompts, head="", target="tiny", **more))
    assert list((prompts.parent / "out").iterdir()) == []


def test_a_head_whose_own_tree_cannot_be_sampled_is_refused(prompts: Path, use: Use) -> None:
    head = Scripted([], 0, parse_tree("dynamic:nodes=8,depth=4,topk=3"))
    head.kind = "scripted"  # type: ignore[attr-defined]
    use(head)
    with pytest.raises(
        UserError, match=r"option tree: dynamic:.* cannot sample its drafts; use a chain or a static tree"
    ):
        evaluate.evaluate(options(prompts, draft_temperature=1.0))


def test_a_head_of_a_run_is_reported_beside_it() -> None:
    assert evaluate.default_folder(Path("runs/x/head")) == Path("runs/x/eval")
    assert evaluate.default_folder(Path("mine")) == Path("mine/eval")


# -------------------------------------------------------------------------------------------- real decoding


@pytest.mark.parametrize("right", [0, 2, 3])
def test_measured_acceptance_is_what_the_drafter_was_scripted_for(
    prompts: Path, use: Use, target: Target, right: int
) -> None:
    use(Knowing(target, right))
    report = evaluate.evaluate(options(prompts, tree=["chain:3", "static:[[0],[1],[0,0]]"]))
    entry = report["suites"]["few"]
    assert entry["lossless"] == {"checked": 4, "equal": 4, "divergences": []}
    assert report["suites"]["few@static:[[0],[1],[0,0]]"]["lossless"]["equal"] == 4
    passes = [math.ceil((row["tokens"] - 1) / (right + 1)) for row in report["runs"][:4]]
    assert entry["passes"] == sum(passes)
    committed = sum(row["tokens"] - 1 for row in report["runs"][:4])
    assert entry["acceptance_length"] == pytest.approx(committed / sum(passes))
    assert entry["survival"][:right] == pytest.approx([1.0] * right)
    assert math.isfinite(entry["speedup"])


def test_sampled_text_is_checked_for_equality_too(prompts: Path, use: Use, target: Target) -> None:
    use(Knowing(target, 2, sampling=(1.0, 7)))
    report = evaluate.evaluate(options(prompts, temperature=1.0, seed=7))
    entry = report["suites"]["few"]
    assert entry["lossless"]["equal"] == 4
    assert entry["acceptance_length"] > 2.5


def test_plain_decoding_is_compared_with_generate_of_transformers(prompts: Path, use: Use, target: Target) -> None:
    use(Knowing(target, 3))
    entry = evaluate.evaluate(options(prompts, generate_prompts=2))["suites"]["few"]
    assert entry["generate_equal"] == {"checked": 2, "equal": 2}
    assert entry["generate_ratio"] > 0
    sampled = evaluate.evaluate(options(prompts, generate_prompts=2, temperature=0.8))["suites"]["few"]
    assert sampled["generate_equal"] == {"checked": 0, "equal": 0} and sampled["generate_ratio"] > 0


def test_a_repetition_penalty_is_plain_decodings_and_generates_too(prompts: Path, use: Use, target: Target) -> None:
    use(None)
    penalised = alone(prompts, "prompt_lookup", "self:0-4", repetition_penalty=1.5, generate_prompts=2, limit=2)
    report = evaluate.evaluate(penalised)
    assert report["suites"]["few"]["generate_equal"] == {"checked": 2, "equal": 2}
    assert report["suites"]["few"]["lossless"]["equal"] == report["suites"]["few@self:0-4"]["lossless"]["equal"] == 2
    ids = encoded(target, ROWS[0][1])
    assert report["runs"][0]["plain_tokens"] == 24
    assert generate(target, ids, sampler=Sampler(repetition_penalty=1.5)).tokens != generate(target, ids).tokens


SAMPLED = {"temperature": 0.8, "draft_temperature": 1.2, "top_k": 20, "min_p": 0.02, "limit": 2}


@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block", "typical"])
def test_only_text_that_must_be_equal_is_compared(
    prompts: Path, use: Use, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use(None)
    report = evaluate.evaluate(alone(prompts, "self:0-6", rule=rule, generate_prompts=1, **SAMPLED))
    entry, out = report["suites"]["few"], capsys.readouterr().out
    assert (entry["rule"], entry["lossy"], report["settings"]["rule"]) == (rule, rule == "typical", rule)
    assert entry["passes"] > 0 and entry["speedup"] > 0
    if rule == "exact_match":
        assert entry["lossless"]["equal"] == entry["lossless"]["checked"] == 2
        assert "text identical to plain decoding: 2/2 prompts" in out
        return
    assert entry["lossless"] == {"checked": 0, "equal": 0, "divergences": []}
    assert [row["equal"] for row in report["runs"]] == [None, None]
    assert "identical to plain decoding" not in out
    if rule == "typical":
        assert "self:0-6 on tiny-llama (lossy)" in out and "LOSSY: under the rule typical" in out
        written = json.loads((prompts.parent / "out" / "report.json").read_text())
        assert all(suite["lossy"] for suite in written["suites"].values())
        assert all(row["lossy"] for row in written["runs"])
        assert "LOSSY: under the rule typical" in page.render_html(written)
    else:
        assert f"under the rule {rule} the text follows plain decoding's distribution" in out


@pytest.mark.parametrize("rule", ["", "exact_match", "block"])
def test_greedy_text_is_compared_under_every_lossless_rule(prompts: Path, use: Use, rule: str) -> None:
    use(None)
    report = evaluate.evaluate(alone(prompts, "self:0-4", rule=rule, draft_temperature=0.5, limit=2))
    assert report["suites"]["few"]["rule"] == (rule or "rejection")
    assert report["suites"]["few"]["lossless"] == {"checked": 2, "equal": 2, "divergences": []}


@pytest.mark.parametrize("kind", list(HEADS))
def test_the_command_measures_every_kind_of_head_end_to_end(
    kind: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    loaded = Target.load(str(tmp_path / "target"), device="cpu", pack=False)
    config = HEADS[kind].Config(**{"layers": [1, 3, 5]} if kind == "eagle3" else {})
    head = HEADS[kind](config, loaded)
    head.tree = chain(2)
    save_head(head, tmp_path / "head", {})
    command = ["eval", "--head", str(tmp_path / "head"), "--prompts", str(prompts), "--max-new-tokens", "16"]
    main.main([*command, "--device", "cpu", "--generate-prompts", "1"])

    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert (report["schema"], report["kind"], report["dtype"]) == (1, kind, "float32")
    assert report["settings"]["tree"] == ["chain:2"] and parse_tree(report["suites"]["few"]["tree"]) == chain(2)
    entry = report["suites"]["few"]
    assert entry["lossless"]["equal"] == 4
    keys = {"passes", "tokens", "acceptance_length_ci", "conditional_acceptance", "speedup_ci", "seconds"}
    assert keys <= set(entry)
    assert set(entry["seconds"]) == {"draft", "verify", "commit", "other", "prefill"}
    assert (tmp_path / "eval" / "report.html").read_text().startswith("<!doctype html>")
    assert "text identical to plain decoding: 4/4 prompts" in capsys.readouterr().out


def test_the_command_measures_a_drafter_without_a_head(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    draft = f"draft_model:{tmp_path / 'target'}"
    command = ["eval", "--target", str(tmp_path / "target"), "--drafter", draft, "--drafter", "prompt_lookup:ngram=2"]
    limits = ["--max-new-tokens", "11", "--limit", "2", "--generate-prompts", "0", "--device", "cpu"]
    main.main([*command, *limits, "--prompts", str(prompts), "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["schema"], report["head"], report["kind"]) == (1, "", draft)
    assert report["suites"]["few"]["acceptance_length"] == 5.0, "the target itself drafts"
    assert report["suites"]["few@prompt_lookup:ngram=2"]["lossless"]["equal"] == 2
    assert "text identical to plain decoding: 2/2 prompts" in capsys.readouterr().out
