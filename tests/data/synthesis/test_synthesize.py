"""Writing conversations: steering in any template, rounds, drops, resuming. A script plays the model."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spechead.data.synthesis import synthesize as module
from spechead.data.synthesis.continuous import Continuation, Done, Request
from spechead.data.synthesis.filters import refuse_answer
from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.data.synthesis.synthesize import (
    SynthesizeOptions,
    choose_kinds,
    parse_kinds,
    synthesize,
)
from spechead.data.template_record import recorded_template, template_warning
from spechead.errors import UserError
from spechead.target.chat_template import ChatTemplate, read_template
from spechead.target.model import Target
from tests.helpers.targets import CHATML, make_target, make_toy_tokenizer

NOUNS = ["apples", "bridges", "candles", "deserts", "engines", "forests", "gardens", "hammers", "islands"]
END = 2  # <|im_end|>
VERBS = ["paint", "carry", "measure", "borrow", "repair", "clean", "build", "sell", "describe", "compare"]


class Script:
    """Stands in for the model: writes questions behind the opening of a user turn, and answers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls, self.stop_after = tokenizer, 0, 10**9
        self.seen: list[str] = []
        self.requests: list[Request] = []

    def run(self, requests: Iterator[Request], done: Done) -> None:
        for request in requests:
            self.calls += 1
            if self.calls > self.stop_after:
                raise KeyboardInterrupt
            text = self.tokenizer.decode(request.prompt).replace(" ", "")
            self.seen.append(text)
            self.requests.append(request)
            assert not list(done(request, self.write(text.endswith("assistant\n"), random.Random(request.seed))))

    def write(self, answering: bool, chooser: random.Random) -> Continuation:
        if answering:
            return self.written(" ".join(chooser.sample(NOUNS, 6)), finished=chooser.random() < 0.5)
        if chooser.random() < 0.1:
            return self.written(" to see whether that is", finished=False)
        words = [chooser.choice(VERBS), *chooser.sample(NOUNS, 5)]
        return self.written(f" {' '.join(words)}?", finished=True)

    def written(self, text: str, finished: bool) -> Continuation:
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Continuation(tokens, finished, END if finished else None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    target = make_target()
    monkeypatch.setattr(module.Target, "load", classmethod(lambda cls, name, **_: target))
    # One character a token makes any text look repetitive.
    monkeypatch.setattr(module, "refuse_answer", lambda text, tokens, keep_loops: refuse_answer(text, tokens, True))
    # The toy tokenizer puts spaces between its tokens.
    monkeypatch.setattr(
        target.tokenizer, "decode", lambda ids, **_: "".join(target.tokenizer.convert_ids_to_tokens(ids))
    )
    stand_in = Script(make_toy_tokenizer())
    monkeypatch.setattr(module, "ContinuousDecoder", lambda *_, **__: stand_in)
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


@pytest.mark.parametrize(("stop_after", "turns"), [(0, 1), (1, 1), (40, 1), (64, 1), (100, 1), (70, 3), (140, 3)])
def test_interrupted_and_started_again_it_comes_to_the_same_file(
    tmp_path: Path, script: Script, stop_after: int, turns: int
) -> None:
    synthesize(options(tmp_path / "whole", max_turns=turns))
    calls, script.calls, script.stop_after = script.calls, 0, stop_after
    with pytest.raises(KeyboardInterrupt):
        synthesize(options(tmp_path, max_turns=turns))
    assert not (tmp_path / "out.jsonl").exists()
    script.calls, script.stop_after = 0, 10**9
    synthesize(options(tmp_path, max_turns=turns))
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole" / "out.jsonl").read_text()
    # Whole rounds are not written again (with one turn, the first is of 32 prompts and at most as many answers).
    assert script.calls <= calls and (stop_after < 64 * turns or script.calls < calls)


def test_an_interrupted_command_can_be_given_another_count_but_no_other_seed(tmp_path: Path, script: Script) -> None:
    script.stop_after = 64
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
    assert left[:40] == prompts[5:45] and len(left) == 60, (
        "rounds of the largest size do not depend on what is left out"
    )
    assert meta["dropped"]["prompt is excluded"] >= 5


def test_a_target_that_writes_no_user_turns_is_refused(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "write", lambda *_: script.written(" and so on", finished=False))
    with pytest.raises(UserError, match=r"wrote 0 usable prompts of 128 \(128 prompt unfinished\)"):
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


def test_a_mistyped_target_does_not_bind_the_next_attempt(tmp_path: Path, script: Script) -> None:
    def fail(self: SynthesizeOptions) -> None:
        raise UserError("cannot be loaded")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="cannot be loaded"):
        patch.setattr(SynthesizeOptions, "load", fail)
        synthesize(options(tmp_path, target="smolm2"))
    assert list(tmp_path.iterdir()) == []
    synthesize(options(tmp_path, count=3))
    assert len(rows(tmp_path / "out.jsonl")) == 3


def test_a_template_that_fails_does_not_bind_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    monkeypatch.setattr(module.Target, "load", classmethod(lambda cls, name, **_: target))
    for template in ("{{ raise_exception('never') }}", "{{ messages[0].role }}"):
        target.chat = ChatTemplate(target.tokenizer, template)
        with pytest.raises(UserError, match="refuses a chat: never|drops the content of a user turn"):
            synthesize(options(tmp_path, chat_template=template))
    assert list(tmp_path.iterdir()) == []


def test_other_settings_are_refused_before_the_target_is_loaded(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.stop_after = 5
    with pytest.raises(KeyboardInterrupt):
        synthesize(options(tmp_path))
    monkeypatch.setattr(SynthesizeOptions, "load", None)
    for changes in ({"max_turns": 2}, {"language": "German"}):
        with pytest.raises(UserError, match=f"was begun with {next(iter(changes))} = "):
            synthesize(options(tmp_path, **changes))


@pytest.mark.parametrize("count", [1, 5, 20])
def test_few_conversations_need_few_prompts(tmp_path: Path, script: Script, count: int) -> None:
    synthesize(options(tmp_path, count=count, batch_size=64))
    prompts = sum(not text.endswith("assistant\n") for text in script.seen)
    assert len(rows(tmp_path / "out.jsonl")) == count and prompts <= max(8, 2 * count)


def test_the_ids_of_the_answers_are_kept_as_they_were_written(tmp_path: Path, script: Script) -> None:
    synthesize(options(tmp_path, count=10))
    tokenizer = make_toy_tokenizer()
    for row in rows(tmp_path / "out.jsonl"):
        [ids] = row["answer_ids"]
        end = [END] if row["meta"]["finish"] == "eos" else []
        assert ids == tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"] + end
        assert row["meta"]["tokenizer"] == ChatTemplate(tokenizer).tokenizer_digest


# ------------------------------------------------------------------------------------------------ turns, languages


def test_conversations_of_several_turns(tmp_path: Path, script: Script) -> None:
    meta = synthesize(options(tmp_path, max_turns=3))
    written = rows(tmp_path / "out.jsonl")
    turns = Counter(len(row["answer_ids"]) for row in written)
    assert set(turns) == {1, 2, 3} and sum(turns.values()) == 60
    assert meta["turns"] == {str(n): count for n, count in sorted(turns.items())}
    assert meta["dropped"]["follow-up: prompt unfinished"] > 0
    asked = {re.sub(r"\s|<\|im_end\|>|<\|im_start\|>(user|assistant)\n", "", text) for text in script.seen}
    for row in written:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * len(row["answer_ids"])
        assert all(ids[-1] == END for ids in row["answer_ids"][:-1]), "nobody goes on from half an answer"
        assert (row["answer_ids"][-1][-1] == END) == (row["meta"]["finish"] == "eos")
        # The user's next message is written after the whole conversation, and so is the answer to it.
        said = re.sub(r"\s", "", "".join(message["content"] for message in row["messages"][:-1]))
        assert said in asked
    one = rows_of_one_turn(tmp_path)
    assert [row["messages"][0] for row in written[:20]] == [row["messages"][0] for row in one[:20]]


def rows_of_one_turn(tmp_path: Path) -> list[dict[str, Any]]:
    synthesize(options(tmp_path / "one"))
    return rows(tmp_path / "one" / "out.jsonl")


def test_a_follow_up_that_is_not_usable_ends_the_conversation(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(answering: bool, chooser: random.Random) -> Continuation:
        if answering:
            return script.written(" ".join(chooser.sample(NOUNS, 6)), finished=True)
        further = "assistant\n" in script.seen[-1]
        return script.written("Go on." if further else f" {' '.join(chooser.sample(NOUNS, 6))}?", finished=True)

    monkeypatch.setattr(script, "write", write)
    meta = synthesize(options(tmp_path, count=20, max_turns=4))
    assert meta["turns"] == {"1": 20} and meta["dropped"]["follow-up: prompt too short"] >= 20


def test_an_answer_that_is_not_usable_takes_its_question_along(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers to a second question, which follows an answer, are empty.
    def write(answering: bool, chooser: random.Random) -> Continuation:
        if answering and script.seen[-1].count("assistant\n") == 2:
            return Continuation([], True, END)
        words = chooser.sample(NOUNS, 6)
        return script.written(f" {' '.join(words)}?", finished=True)

    monkeypatch.setattr(script, "write", write)
    meta = synthesize(options(tmp_path, count=20, max_turns=2))
    assert meta["turns"] == {"1": 20} and meta["dropped"]["follow-up: answer empty"] > 0
    assert all(len(row["messages"]) == 2 for row in rows(tmp_path / "out.jsonl"))


def test_an_excluded_follow_up_excludes_the_conversation(tmp_path: Path, script: Script) -> None:
    synthesize(options(tmp_path / "all", max_turns=2))
    second = [r["messages"][2]["content"] for r in rows(tmp_path / "all" / "out.jsonl") if len(r["messages"]) > 2]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"turns": [p]}) + "\n" for p in second[:5]))
    meta = synthesize(options(tmp_path, max_turns=2, exclude=str(held_out)))
    text = (tmp_path / "out.jsonl").read_text()
    assert meta["dropped"]["prompt is excluded"] >= 5 and not any(prompt in text for prompt in second[:5])


def test_another_language_leaves_the_first_words_to_the_target(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "qz" + "".join(map(chr, range(33, 60)))  # no words, few letters: not English

    def write(answering: bool, chooser: random.Random) -> Continuation:
        return script.written("".join(chooser.sample(text, 20)), finished=True)

    monkeypatch.setattr(script, "write", write)
    synthesize(options(tmp_path, count=12, language="Klingon"))
    asked = [text for text in script.seen if not text.endswith("assistant\n")]
    assert all(text.endswith("user\n") and "writeseverymessageinKlingon" in text for text in asked)
    assert not any("Klingon" in text for text in script.seen if text.endswith("assistant\n"))


def test_halves_of_characters_never_crash(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    half = "\ud83d"
    held_out = tmp_path / "held\udcff.jsonl"
    held_out.write_text(json.dumps({"turns": [f"Is {half} half a character?"]}) + "\n")
    monkeypatch.setattr(
        Script, "write", lambda self, answering, chooser: self.written(" ".join(chooser.sample(NOUNS, 6)), True)
    )
    real = script.tokenizer.convert_ids_to_tokens
    target = SynthesizeOptions(device="cpu").load()
    monkeypatch.setattr(target.tokenizer, "decode", lambda ids, **_: "".join(real(ids)) + half * (ids[0] % 2))
    meta = synthesize(options(tmp_path, count=9, exclude=str(held_out)))
    assert meta["dropped"]["prompt holds broken characters"] > 0
    assert meta["dropped"]["answer holds broken characters"] > 0
    assert half not in (tmp_path / "out.jsonl").read_text()
    with pytest.raises(UserError, match="option language: is not valid UTF-8"):
        options(tmp_path, language="\udcff")


# ------------------------------------------------------------------------------------------------ its parts


def test_kinds_that_are_behind_get_more() -> None:
    weights = {"a": 1.0, "b": 1.0}
    kinds = Counter(choose_kinds(weights, Counter(a=100, b=0), 60, random.Random(0)))
    assert kinds == {"b": 60}
    assert Counter(choose_kinds(weights, Counter(), 1000, random.Random(0)))["a"] == pytest.approx(500, abs=60)


def test_kinds_of_the_command_line() -> None:
    assert parse_kinds("coding=2, maths") == {"coding": 2.0, "maths": KINDS["maths"].weight}
    assert set(parse_kinds("")) == set(KINDS)


def test_the_template_is_recorded_as_it_is_rendered_and_a_later_day_keeps_the_date(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    dated = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    (tmp_path / "t.jinja").write_text(dated)

    def load(cls: type[Target], name: str, **more: Any) -> Target:
        text = read_template(more["chat_template"], target.tokenizer)
        target.chat = ChatTemplate(target.tokenizer, text, date=more["template_date"])
        return target

    monkeypatch.setattr(module.Target, "load", classmethod(load))
    given = {"chat_template": str(tmp_path / "t.jinja"), "count": 20}
    script.stop_after = 30
    with pytest.raises(KeyboardInterrupt):
        synthesize(options(tmp_path / "out", template_date="2024-07-26", **given))
    script.stop_after = 10**9
    meta = synthesize(options(tmp_path / "out", **given))
    assert meta["options"]["template_date"] == "2024-07-26"
    assert template_warning(target.chat.record(), recorded_template(str(tmp_path / "out" / "out.jsonl")), "it is") == ""
