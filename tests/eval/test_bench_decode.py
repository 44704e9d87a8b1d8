"""The benchmark: its arithmetic on runs made by hand, its settings, then the script on a tiny target."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from eval import bench_decode as bench
from spechead.cli.main import one_line_errors
from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats, generate
from spechead.decoding.tree import Plan, Static, Tree, chain
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.errors import UserError
from spechead.evaluation.aggregate import Decoded, Reference
from spechead.evaluation.measure import Mode, Question, make_modes
from spechead.heads import HEADS
from spechead.heads.files import save_head
from spechead.target.cache import KVCache
from spechead.target.loading import native_bfloat16
from spechead.target.model import Target
from tests.helpers.clock import Clock
from tests.helpers.drafters import Scripted
from tests.helpers.targets import make_target

PROMPT = Prompt(0, "c", "?")


# --------------------------------------------------------------------------------------- numbers, by hand


def run(seconds: float, tokens: Sequence[int], passes: int, spent: Sequence[float] = (0, 1, 0, 0, 0)) -> Decoded:
    """`spent`: seconds of draft, verify, accept, commit, other."""
    phases = dict(zip(("draft", "verify", "accept", "commit", "other"), spent, strict=True))
    return Decoded(list(tokens), seconds, Stats(passes, len(tokens) - 1, seconds={"prefill": 100.0} | phases))


LONG, SHORT = [5, 6, 7, 8, 9], [5, 6, 7]
OUTPUTS: bench.Outputs = {
    "plain": [
        run(5.0, LONG, 4, (0.0, 3.0, 0.25, 0.25, 0.5)),
        run(6.0, SHORT, 2, (0.0, 3.0, 0.25, 0.25, 0.5)),
        run(9.0, SHORT, 2, (0.0, 2.0, 1.0, 0.0, 1.0)),
    ],
    "generate": [Reference(LONG, 10.0), Reference(SHORT, 3.0), Reference(SHORT, 6.0)],  # plain / generate: 0.5, 2, 1.5
    "head chain:3": [
        run(5.0, LONG, 4, (1.0, 2.0, 0.5, 0.5, 0.0)),
        run(2.0, [5], 0),  # an answer of one token has no pass
        run(4.5, SHORT, 1, (1.0, 2.0, 0.0, 1.0, 0.0)),
    ],
    "prompt_lookup chain:3": [run(2.5, LONG, 1), run(6.0, SHORT, 2), run(3.0, SHORT, 1)],  # speed-up 2, 1, 3
    "generate, prompt_lookup chain:3": [
        Reference(LONG, 5.0),  # ours / generate's: 0.5
        Reference([5, 6, 8], 3.0),  # 2
        Reference(SHORT, 6.0),  # 0.5
    ],
    "prompt_lookup chain:5": [run(9.0, LONG, 1), run(9.0, SHORT, 2), run(9.0, SHORT, 1)],
    "generate, prompt_lookup chain:5": [Reference(LONG, 9.0), Reference(SHORT, 9.0), Reference(SHORT, 9.0)],
}
OUTSIDE = {"plain": 0.5, "head chain:3": 0.05, "prompt_lookup chain:3": 0.07, "prompt_lookup chain:5": None}


def test_ratios_are_medians_over_the_prompts() -> None:
    found = bench.numbers(OUTPUTS, OUTSIDE)
    assert found["plain_over_generate"] == 1.5
    assert found["over_generate"] == {"prompt_lookup chain:3": 0.5, "prompt_lookup chain:5": 1.0}
    assert found["lookup_over_generate_lookup"] == 0.5, "of the first tree"
    assert found["drafters"]["prompt_lookup chain:3"] == {
        "acceptance_length": 2.0,  # (4 + 2 + 2) tokens in (1 + 2 + 1) passes: pooled, not a mean of means
        "seconds_per_token": 1.0,  # of 0.5, 2, 1
        "speedup": 2.0,
    }
    assert list(found["drafters"]) == ["head chain:3", "prompt_lookup chain:3", "prompt_lookup chain:5"]
    assert found["decoders"]["plain"]["speedup"] == 1.0 and found["decoders"]["plain"]["acceptance_length"] == 1.0
    theirs = found["decoders"]["generate"]
    assert theirs["acceptance_length"] is theirs["overhead_share"] is theirs["phases"] is None


def test_overhead_is_the_worst_drafters_and_phases_leave_the_prefill_out() -> None:
    found = bench.numbers(OUTPUTS, OUTSIDE)
    assert found["overhead_share"] == 0.07, "plain decoding drafts nothing"
    assert found["decoders"]["head chain:3"]["overhead_share"] == 0.05
    assert found["decoders"]["head chain:3"]["phases"] == {
        "draft": 0.25,  # 2 of the 8 seconds of both answers that have passes
        "verify": 0.5,
        "accept": 0.0625,
        "commit": 0.1875,
        "other": 0.0,
    }


def shown(found: dict[str, Any], capsys: pytest.CaptureFixture[str], dtype: str = "float32") -> str:
    bench.print_results(found | {"v": {"1": 1.0, "4": 1.25}, "v_past": 80, "settings": {"dtype": dtype}})
    return str(capsys.readouterr().out)


def test_texts_that_differ_are_an_alarm_only_where_they_are_ours(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.numbers({name: runs for name, runs in OUTPUTS.items() if name != "head chain:3"}, OUTSIDE)
    assert found["texts"] == {"checked": 6, "equal": 6}
    assert found["generate_texts"] == {"checked": 9, "equal": 8}
    text = shown(found, capsys)
    assert "NOT LOSSLESS" not in text and "generate wrote plain decoding's text 8 of 9 times" in text
    assert "1.25" in text and "after 80 tokens" in text


def test_texts_of_ours_that_differ_are_an_alarm_only_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.numbers(OUTPUTS, OUTSIDE)
    assert found["texts"] == {"checked": 9, "equal": 8}
    assert found["decoders"]["head chain:3"]["texts"] == {"checked": 3, "equal": 2}
    assert "NOT LOSSLESS: 8 of 9 texts with drafts equal plain decoding's in float32" in shown(found, capsys)
    half = shown(found, capsys, "bfloat16")
    assert "NOT LOSSLESS" not in half and "8 of 9 texts with drafts equal plain decoding's in bfloat16" in half


def question(ids: Sequence[int], cap: int) -> Question:
    return Question(PROMPT, list(ids), cap)


def test_decoders_take_turns_in_a_rotating_order_after_a_warm_up() -> None:
    calls: list[tuple[str, int]] = []

    def decoder(name: str) -> Any:
        def decode(asked: Question) -> Decoded:
            calls.append((name, asked.max_new_tokens))
            return run(1.0, LONG, 4)

        return decode

    names = ["plain", "b", "c"]
    runs = bench.measure({name: decoder(name) for name in names}, [question([1], cap) for cap in (90, 91, 92, 93)])
    assert calls[:3] == [("plain", 32), ("b", 32), ("c", 32)]
    assert [name for name, _ in calls[3:]] == [*names, "b", "c", "plain", "c", "plain", "b", *names]
    assert [cap for _, cap in calls[3:]] == [90] * 3 + [91] * 3 + [92] * 3 + [93] * 3
    assert [len(found) for found in runs.values()] == [4, 4, 4]


def test_answers_without_a_pass_cannot_be_measured() -> None:
    with pytest.raises(UserError, match="every answer ended with its first token"):
        bench.measure({"plain": lambda _: run(1.0, [2], 0)}, [question([1], 9)])


# ------------------------------------------------------------------------------------- outside the models


class Modular(Scripted):
    """Drafts with a module of two levels."""

    def __init__(self) -> None:
        super().__init__([0] * 99, 0)
        self.inner = torch.nn.Identity()
        self.outer = torch.nn.Sequential(self.inner, self.inner)

    def propose(self, *args: Any, **more: Any) -> Tree:
        self.outer(torch.zeros(1))
        return super().propose(*args, **more)


def test_overhead_is_what_passes_outside_of_modules(clock: Clock) -> None:
    target = make_target()
    asked = [question(range(5, 14), 200), question(range(8, 20), 200)]
    drafter = Modular()
    mode = Mode("scripted", drafter, chain(3), requested=False, head=False)
    clock.slow(drafter, "propose", 10.0)
    clock.slow(drafter.inner, "forward", 3.0)
    clock.slow(target.decoder, "forward", 3.0)
    clock.slow(target._output, "forward", 1.0)
    clock.slow(KVCache, "keep", 2.0)
    # 63 passes, the last without room for drafts; a module inside a module counts once, the prefill not at all.
    drafting, rest, models = 62 * 10, 63 * 2, 62 * 6 + 63 * 4
    assert bench.overhead(target, asked, mode) == pytest.approx((drafting + rest) / (drafting + rest + models))
    assert bench.overhead(target, asked) == pytest.approx(2 / 6)
    hooks = torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks
    assert not any(hooks)


def test_an_answer_without_a_pass_has_no_overhead() -> None:
    target = make_target()
    first = generate(target, [5, 6], max_new_tokens=1).tokens[0]
    target.eos_ids = frozenset({first})
    assert bench.overhead(target, [question([5, 6], 9)]) is None


# ---------------------------------------------------------------------------------------- equal settings


def lookup_mode(plan: Plan, ngram: int = 2, match: str = "first") -> Mode:
    return Mode("prompt_lookup", PromptLookup(ngram, match), plan, requested=True, head=False)


def test_both_prompt_lookups_draft_the_same(target: Target) -> None:
    mode = lookup_mode(chain(3))
    other = bench.counterpart(target, mode)
    assert other is not None
    settings = other.keywords
    like = PromptLookupCandidateGenerator(
        num_output_tokens=settings["prompt_lookup_num_tokens"],
        max_matching_ngram_size=settings["max_matching_ngram_size"],
        max_length=99,
    )
    generator = torch.Generator().manual_seed(0)
    drafted = 0
    for _ in range(40):
        text: Any = torch.randint(5, 9, (12,), generator=generator)
        state = mode.drafter.new_state(text[:-1])
        tree = mode.drafter.propose(state, text[1:], None, mode.plan)  # type: ignore[arg-type]
        theirs = like.get_candidates(text[None])[0][0, len(text) :]
        assert tree.tokens[1:].tolist() == theirs.tolist()
        drafted += len(theirs)
    assert drafted > 80


def test_the_assistant_of_generate_drafts_as_many_tokens_as_ours(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_target(seed=1)
    given: list[Any] = []
    monkeypatch.setattr(bench, "decode_by_generate", lambda *_, **settings: given.append(settings))
    for depth in (7, 3):
        mode = Mode("draft_model:x", DraftModel(target, draft), chain(depth), requested=True, head=False)
        other = bench.counterpart(target, mode)
        assert other is not None
        other(question([5], 9))
        assert given.pop() == {"assistant_model": draft.model}
        config = draft.model.generation_config
        assert (config.num_assistant_tokens, config.num_assistant_tokens_schedule) == (depth, "constant")
        assert config.assistant_confidence_threshold == 0


def test_where_generate_has_no_like_it_is_not_measured(target: Target) -> None:
    draft = DraftModel(target, make_target(seed=1))
    tree = Static(((0,), (1,)))
    without = [
        lookup_mode(chain(3), match="latest"),
        Mode("draft_model:x", draft, tree, requested=True, head=False),
        Mode("draft_model:x", draft, chain(3, floor=0.2), requested=True, head=False),
        Mode("self:0-3", SelfSpeculative(target, (0, 1, 2, 3)), chain(3), requested=True, head=False),
    ]
    assert [bench.counterpart(target, mode) for mode in without] == [None] * 4


def test_prompt_lookup_is_always_measured_and_trees_are_for_all_that_can_draft_them(target: Target) -> None:
    assert bench.BenchOptions().target == "smollm2-135m" and bench.BenchOptions(head="h").target == ""
    options = bench.BenchOptions(drafter=["self:0-3"], tree=["static:[[0],[1]]", "chain:2"])
    found = make_modes(options, target)
    assert [mode.name for mode in found] == [
        "prompt_lookup chain:2",
        "self:0-3 static:[[0],[1]]",
        "self:0-3 chain:2",
    ]
    assert list(bench.make_decoders(target, found)) == [
        "plain",
        "generate",
        "prompt_lookup chain:2",
        "generate, prompt_lookup chain:2",
        "self:0-3 static:[[0],[1]]",
        "self:0-3 chain:2",
    ]
    [only] = make_modes(bench.BenchOptions(drafter=["prompt_lookup"]), target)
    assert only.name == "prompt_lookup"


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
    drafters = ["self:0-3", "draft_model:target", "staged:self:0-2+prompt_lookup"]
    bench.main(
        [
            *("--head", "head", "--tree", "chain:4", "--tree", "static:[[0],[1],[0,0]]"),
            *(word for name in drafters for word in ("--drafter", name)),
            *("--target", "target", "--prompts", "prompts.jsonl", "--max-new-tokens", "11", "--device", "cpu"),
            *("--json", "out/bench.json"),
        ]
    )
    found = json.loads((folder / "out" / "bench.json").read_text())
    for name in ("plain_over_generate", "lookup_over_generate_lookup", "overhead_share"):
        assert isinstance(found[name], float) and math.isfinite(found[name])
    assert 0 < found["overhead_share"] < 1
    assert list(found["v"]) == ["1", "2", "3", "4", "6", "8", "12", "16", "24", "32", "48", "64"]
    assert found["v"]["1"] == 1.0 and all(isinstance(value, float) and value > 0 for value in found["v"].values())
    assert list(found["drafters"]) == [
        "eagle3 chain:4",
        "eagle3 static:[[0],[1],[0,0]]",
        "prompt_lookup chain:4",
        "self:0-3 chain:4",
        "self:0-3 static:[[0],[1],[0,0]]",
        "draft_model:target chain:4",
        "draft_model:target static:[[0],[1],[0,0]]",
        "staged:self:0-2+prompt_lookup chain:4",
    ]
    for entry in found["drafters"].values():
        assert set(entry) == {"acceptance_length", "seconds_per_token", "speedup"}
        assert all(isinstance(value, float) and value > 0 for value in entry.values())
        assert entry["acceptance_length"] >= 1
    assert found["drafters"]["draft_model:target chain:4"]["acceptance_length"] == 5.0, "the target itself drafts"
    assert list(found["over_generate"]) == ["prompt_lookup chain:4", "draft_model:target chain:4"]
    for name in ("plain", *found["drafters"]):
        assert 0 < found["decoders"][name]["overhead_share"] < 1
        assert sum(found["decoders"][name]["phases"].values()) == pytest.approx(1)
    assert found["texts"] == {"checked": 2 * 8, "equal": 2 * 8}
    assert found["generate_texts"] == {"checked": 2 * 3, "equal": 2 * 3}  # plain, with look-up, with the assistant
    assert found["settings"]["drafter"] == ["prompt_lookup", *drafters] and found["machine"]["threads"] == 1
    assert found["settings"]["draft_dtype"] == ("bfloat16" if native_bfloat16(torch.device("cpu")) else "float32")

    text = capsys.readouterr().out
    assert "NOT LOSSLESS" not in text and "v(n)" in text
    assert all(name in text for name in found["decoders"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "1"], "option max_new_tokens: must be at least 2, got 1"),
        (["--limit", "-1"], "option limit: must be at least 0, got -1"),
        (["--head", "nowhere", "--tree", "bush:3"], "option tree: 'bush:3' is not a tree"),
        (["--head", "nowhere"], "no head at nowhere"),
        (["--json", "."], "option json: . is a folder, name a file"),
        (["--drafters", "x"], "unknown option drafters (did you mean drafter?)"),
        (["--drafter", "self:0-3 chain:2"], "option drafter: 'self:0-3 chain:2' is not a drafter"),
        (["--draft-dtype", "int8"], "option draft_dtype: 'int8' is not one of auto"),
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


def test_options_of_loading_reach_the_target(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    given: dict[str, Any] = {}

    def load(name: str, **more: Any) -> Target:
        given.update(more, name=name)
        raise UserError("enough")

    monkeypatch.setattr(Target, "load", load)
    flags = ["--target", "t", "--device", "cuda:1", "--trust-remote-code", "--dtype", "bfloat16"]
    with pytest.raises(UserError, match="enough"):
        bench.main([*flags, "--prompts", str(folder / "prompts.jsonl")])
    loaded = {"name": "t", "adapter": "", "device": "cuda:1", "trust_remote_code": True, "dtype": "bfloat16"}
    template = {"template_kwargs": {}, "chat_template": "", "template_date": ""}
    assert given == loaded | template | {"pack": True}
