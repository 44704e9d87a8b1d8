"""Writing conversations: steering in any template, rounds, drops, resuming. A script plays the model."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spechead.data.synthesis import synthesize as module
from spechead.data.synthesis.batch_decode import Continuation
from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.data.synthesis.synthesize import (
    SynthesizeOptions,
    choose_kinds,
    closing_tokens,
    parse_kinds,
    steering,
    synthesize,
)
from spechead.errors import UserError
from spechead.target.model import Target
from tests.helpers.targets import make_target, make_toy_tokenizer

NOUNS = ["apples", "bridges", "candles", "deserts", "engines", "forests", "gardens", "hammers", "islands"]
VERBS = ["paint", "carry", "measure", "borrow", "repair", "clean", "build", "sell", "describe", "compare"]


class Script:
    """Stands in for the model: writes questions behind the opening of a user turn, and answers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls, self.stop_after = tokenizer, 0, 10**9
        self.seen: list[str] = []

    def __call__(self, target: Target, prompts: Sequence[Sequence[int]], **options: Any) -> list[Continuation]:
        self.calls += 1
        if self.calls > self.stop_after:
            raise KeyboardInterrupt
        chooser = random.Random(options["seed"])
        texts = [self.tokenizer.decode(ids).replace(" ", "") for ids in prompts]
        self.seen += texts
        return [self.write(text.endswith("assistant\n"), chooser, options) for text in texts]

    def write(self, answering: bool, chooser: random.Random, options: dict[str, Any]) -> Continuation:
        if answering:
            text = " ".join(chooser.sample(NOUNS, 6))
            return self.written(text, finished=chooser.random() < 0.5)
        if chooser.random() < 0.1:
            return self.written(" to see whether that is", finished=False)
        words = [chooser.choice(VERBS), *chooser.sample(NOUNS, 5)]
        return self.written(f" {' '.join(words)}?", finished=True)

    def written(self, text: str, finished: bool) -> Continuation:
        return Continuation(self.tokenizer(text, add_special_tokens=False)["input_ids"], finished)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    target = make_target()
    monkeypatch.setattr(module.Target, "load", classmethod(lambda cls, name, **_: target))
    # One character a token makes any text look repetitive.
    monkeypatch.setattr(module, "refuse_answer", lambda text, tokens, keep_loops: "")
    # The toy tokenizer puts spaces between its tokens.
    monkeypatch.setattr(
        target.tokenizer, "decode", lambda ids, **_: "".join(target.tokenizer.convert_ids_to_tokens(ids))
    )
    stand_in = Script(make_toy_tokenizer())
    monkeypatch.setattr(module, "continue_batch", stand_in)
    return stand_in


def options(tmp_path: Path, **changes: Any) -> SynthesizeOptions:
    values: dict[str, Any] = {
        "out": tmp_path / "out.jsonl",
        "count": 60,
        "batch_size": 8,
        "dtype": "float32",
        "device": "cpu",
    }
    return SynthesizeOptions(**values | changes)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------ the command


def test_rows_meta_and_counts(tmp_path: Path, script: Script) -> None:
    meta = synthesize(options(tmp_path))
    written = rows(tmp_path / "out.jsonl")
    assert len(written) == 60
    for row in written:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["meta"]["kind"] in KINDS and row["meta"]["target"] == "tiny-llama"
    assert {row["meta"]["finish"] for row in written} == {"eos", "length"}
    prompts = [row["messages"][0]["content"] for row in written]
    assert len(set(prompts)) == 60
    assert all(prompt.startswith(KINDS[r["meta"]["kind"]].openings) for prompt, r in zip(prompts, written, strict=True))
    assert meta == json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["dropped"]["prompt unfinished"] > 0
    assert (meta["target"], meta["conversations"], meta["options"]["seed"]) == ("tiny-llama", 60, 0)
    assert sum(meta["kinds"].values()) == 60 and len(meta["fingerprint"]) == 64
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_the_steering_system_turn_is_there_for_prompts_only(tmp_path: Path, script: Script) -> None:
    synthesize(options(tmp_path, kinds="coding"))
    system = KINDS["coding"].system.replace(" ", "")
    answered = [text.endswith("assistant\n") for text in script.seen]
    assert any(answered) and not all(answered)
    assert [system in text for text in script.seen] == [not answer for answer in answered]


def test_the_same_seed_writes_the_same_file(tmp_path: Path, script: Script) -> None:
    files = []
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthesize(options(tmp_path / folder, seed=seed))
        files.append((tmp_path / folder / "out.jsonl").read_text())
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("stop_after", [0, 1, 9, 12, 17])
def test_interrupted_and_started_again_it_comes_to_the_same_file(
    tmp_path: Path, script: Script, stop_after: int
) -> None:
    synthesize(options(tmp_path / "whole"))
    calls, script.calls, script.stop_after = script.calls, 0, stop_after
    with pytest.raises(KeyboardInterrupt):
        synthesize(options(tmp_path))
    assert not (tmp_path / "out.jsonl").exists()
    script.calls, script.stop_after = 0, 10**9
    synthesize(options(tmp_path))
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole" / "out.jsonl").read_text()
    # Whole rounds are not written again (8 or fewer calls make one).
    assert script.calls <= calls and (stop_after < 9 or script.calls < calls)


def test_an_interrupted_command_can_be_given_another_count_but_no_other_seed(tmp_path: Path, script: Script) -> None:
    script.stop_after = 9
    with pytest.raises(KeyboardInterrupt):
        synthesize(options(tmp_path))
    script.stop_after = 10**9
    with pytest.raises(UserError, match=r"out\.jsonl\.partial was begun with seed = 0, now 1: .*delete"):
        synthesize(options(tmp_path, seed=1))
    with pytest.raises(UserError, match="max_new_tokens = 256, now 8"):
        synthesize(options(tmp_path, max_new_tokens=8))
    synthesize(options(tmp_path, count=10))
    assert len(rows(tmp_path / "out.jsonl")) == 10


def test_excluded_prompts_are_left_out(tmp_path: Path, script: Script) -> None:
    synthesize(options(tmp_path / "all"))
    prompts = [row["messages"][0]["content"] for row in rows(tmp_path / "all" / "out.jsonl")]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"turns": [p.upper()]}) + "\n" for p in prompts[:5]))
    meta = synthesize(options(tmp_path, exclude=str(held_out)))
    left = [row["messages"][0]["content"] for row in rows(tmp_path / "out.jsonl")]
    assert left[:55] == prompts[5:] and len(left) == 60
    assert meta["dropped"]["prompt is excluded"] >= 5


def test_a_target_that_writes_no_user_turns_is_refused(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "write", lambda *_: script.written(" and so on", finished=False))
    with pytest.raises(UserError, match=r"wrote 0 usable prompts of 32 \(32 prompt unfinished\)"):
        synthesize(options(tmp_path))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "option count: must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "option max_new_tokens: must be"),
        ({"temperature": -1.0}, "option temperature: must be"),
        ({"top_p": 0.0}, "option top_p: must be above 0 and at most 1"),
        ({"kinds": "poetry"}, "option kinds: poetry is unknown, use general, writing"),
        ({"kinds": "coding=-1"}, "option kinds: the weight of coding=-1"),
        ({"kinds": "coding=much"}, "option kinds: the weight of coding=much"),
        ({"exclude": "none.jsonl"}, "none.jsonl: no such file"),
    ],
)
def test_impossible_options_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        synthesize(options(tmp_path, **changes))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the folder .*file"):
        synthesize(options(tmp_path, out=tmp_path / "file" / "out.jsonl"))
    with pytest.raises(UserError, match="is a folder"):
        synthesize(options(tmp_path, out=tmp_path))


# ------------------------------------------------------------------------------------------------ its parts


def test_steering_finds_the_user_turn() -> None:
    found = steering(make_toy_tokenizer(), "Be brief.")
    assert found.opening == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert found.closing == "<|im_end|>\n"
    assert closing_tokens(make_toy_tokenizer(), found.closing) == {2}
    assert closing_tokens(make_toy_tokenizer(), " [/INST]") == set()


def test_steering_without_system_turn_opens_the_users_turn_with_it() -> None:
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    )
    found = steering(tokenizer, "Be brief.")
    assert (found.opening, found.closing) == ("[INST] Be brief.\n\n", " [/INST]")
    assert steering(tokenizer, "").opening == "[INST] "


def test_kinds_that_are_behind_get_more() -> None:
    weights = {"a": 1.0, "b": 1.0}
    kinds = Counter(choose_kinds(weights, Counter(a=100, b=0), 60, random.Random(0)))
    assert kinds == {"b": 60}
    assert Counter(choose_kinds(weights, Counter(), 1000, random.Random(0)))["a"] == pytest.approx(500, abs=60)


def test_kinds_of_the_command_line() -> None:
    assert parse_kinds("coding=2, maths") == {"coding": 2.0, "maths": KINDS["maths"].weight}
    assert set(parse_kinds("")) == set(KINDS)
