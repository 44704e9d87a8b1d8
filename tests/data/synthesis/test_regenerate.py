"""The command that lets a target answer any data set: what it writes, and that it can be killed at any time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spechead.cli import main
from spechead.data.conversation import conversation_of
from spechead.data.synthesis import journal as journal_module
from spechead.data.synthesis import regenerate as module
from spechead.data.synthesis.journal import Journal
from spechead.data.synthesis.regenerate import RegenerateOptions, regenerate
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.target.chat_template import ChatTemplate
from spechead.target.model import Target
from tests.helpers.chat_server import Reply, chat_server, completion, echo
from tests.helpers.targets import CHATML, make_target

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Every target that is loaded is this one, whose greedy answers to some of `ROWS` end before the cap."""
    target = make_target()
    target.eos_ids = target.eos_ids | set(range(70, 90))
    monkeypatch.setattr(module.Target, "load", classmethod(lambda cls, name, **_: target))
    return target


def user(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn} for turn in turns]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


ROWS: list[Any] = [
    *({"messages": user(f"what is {i}?", "and why?", "so?")} for i in range(12)),
    {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"turns": ["one", "two"], "meta": {"kind": "maths"}},
    {"instruction": "add", "input": "1 and 2", "output": "3"},
]


def options(tmp_path: Path, rows: list[Any] | None = None, **changes: Any) -> RegenerateOptions:
    values: dict[str, Any] = {
        "prompts": str(write(tmp_path / "prompts.jsonl", ROWS if rows is None else rows)),
        "out": tmp_path / "out" / "out.jsonl",
        "batch_size": 4,
        "max_new_tokens": 8,
        "dtype": "float32",
        "device": "cpu",
    }
    return RegenerateOptions(**values | changes)


def written(options: RegenerateOptions) -> list[dict[str, Any]]:
    return [json.loads(line) for line in options.out.read_text().splitlines()]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def answers(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in rows]


# ------------------------------------------------------------------------------------------------ in this process


def test_each_turn_is_what_the_target_writes_after_its_own_answers(tmp_path: Path, tiny: Target) -> None:
    chosen = options(tmp_path)
    meta = regenerate(chosen)
    rows = written(chosen)
    assert len(rows) == len(ROWS)
    turns = 0
    for row in rows:
        for place, ids in zip(
            [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"],
            row["answer_ids"],
            strict=True,
        ):
            prompt = tiny.chat.prompt_ids(row["messages"][:place])
            alone = generate(tiny, prompt, max_new_tokens=8)
            assert ids == alone.tokens
            ended = ids[-1] in tiny.eos_ids
            assert row["messages"][place]["content"] == tiny.tokenizer.decode(ids[:-1] if ended else ids)
            turns += 1
        assert row["meta"]["finish"] == ("eos" if ended else "length")
        assert (row["meta"]["target"], row["meta"]["tokenizer"]) == ("tiny-llama", tiny.chat.tokenizer_digest)
    lengths = {len(row["answer_ids"]) for row in rows[:12]}
    assert {1, 2} <= lengths, "no conversation with several turns is tested"
    assert meta == json.loads((chosen.out.parent / "out.jsonl.meta.json").read_text())
    assert (meta["conversations"], meta["turns"], meta["truncated"]) == (15, turns, meta["finish"]["length"])
    assert meta["tokens"] == sum(len(ids) for row in rows for ids in row["answer_ids"])
    assert meta["fingerprint"] == tiny.fingerprint and meta["options"]["template_kwargs"] == {}
    assert left_in(chosen.out.parent) == ["out.jsonl", "out.jsonl.meta.json"]


def test_rows_keep_their_order_system_tools_and_keywords_and_can_be_read_again(tmp_path: Path, tiny: Target) -> None:
    template = (
        "{{ lang }}{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tiny.chat = ChatTemplate(tiny.tokenizer, template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": user("q"), "tools": tools, "chat_template_kwargs": {"lang": "en"}}, *ROWS[12:]]
    chosen = options(tmp_path, rows)
    regenerate(chosen)
    first, second, third, fourth = written(chosen)
    assert (first["tools"], first["chat_template_kwargs"]) == (tools, {"lang": "en"})
    prompt = tiny.chat.prompt_ids(first["messages"][:1], tools, {"lang": "en"})
    assert prompt != tiny.chat.prompt_ids(first["messages"][:1])
    assert first["answer_ids"] == [generate(tiny, prompt, max_new_tokens=8).tokens]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant"]
    assert second["messages"][2]["content"] != "Hello"
    assert third["meta"]["kind"] == "maths" and fourth["messages"][0]["content"].startswith("add")
    assert [row["meta"]["source"].rpartition(" ")[2] for row in written(chosen)] == ["1", "2", "3", "4"]
    for row in written(chosen):
        assert conversation_of(row).answer_ids == row["answer_ids"]


def test_rows_that_cannot_be_answered_are_counted(tmp_path: Path, tiny: Target) -> None:
    tool = [{"role": "assistant", "content": "f()"}, {"role": "tool", "content": "4"}]
    rows = ["{", {"text": "a document"}, {"messages": user("x" * 400)}, {"messages": user("a") + tool + user("b")}]
    chosen = options(tmp_path, [*rows, {"messages": user("hi")}])
    meta = regenerate(chosen)
    assert [row["meta"]["source"].rpartition(" ")[2] for row in written(chosen)] == ["4", "5"]
    assert meta["unusable"] == {"not valid JSON": 1, "a plain document has no prompt": 1}
    assert meta["dropped"] == {"no room for an answer within the target's positions": 1}
    assert len(written(chosen)[0]["messages"]) == 2
    assert sum(meta["ended early"].values()) >= 1


def test_chats_that_the_template_refuses_are_counted(tmp_path: Path, tiny: Target) -> None:
    template = (
        "{% for m in messages %}{% if m['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    tiny.chat = ChatTemplate(tiny.tokenizer, template)
    meta = regenerate(options(tmp_path, [{"messages": user("bad")}, {"messages": user("good")}]))
    assert meta["dropped"] == {"refused by the chat template: no": 1} and meta["conversations"] == 1


def test_a_target_without_a_template_is_refused_before_its_work(tmp_path: Path, tiny: Target) -> None:
    tiny.tokenizer.chat_template = None
    tiny.chat = ChatTemplate(tiny.tokenizer)
    with pytest.raises(UserError, match="target 'tiny-llama' has no chat template; give one as option chat_template"):
        regenerate(options(tmp_path))
    assert not (tmp_path / "out").exists()


def test_samples_follow_from_the_seed_whatever_the_batch(tmp_path: Path, tiny: Target) -> None:
    texts = []
    for name, batch_size, seed in (("a", 4, 0), ("b", 1, 0), ("c", 4, 1)):
        out = tmp_path / f"{name}.jsonl"
        chosen = options(tmp_path, out=out, temperature=[0.0, 0.8, 1.5], batch_size=batch_size, seed=seed)
        regenerate(chosen)
        texts.append([(row["meta"]["temperature"], row["answer_ids"]) for row in written(chosen)])
    assert texts[0] == texts[1] != texts[2]
    assert {temperature for temperature, _ in texts[0]} == {0.0, 0.8, 1.5}


def test_turns_and_rows_are_limited(tmp_path: Path, tiny: Target) -> None:
    chosen = options(tmp_path, max_turns=1, limit=5)
    meta = regenerate(chosen)
    assert meta["turns"] == meta["conversations"] == 5 - meta["dropped"].get("empty answer", 0) > 1


# ------------------------------------------------------------------------------------------------ killed, resumed


def in_a_process(chosen: RegenerateOptions, rank: int = 0, world: int = 1, kill_after: int | None = None) -> Any:
    """Start the command in another process, which is killed in the middle of a line after `kill_after` others."""

    def work() -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        if kill_after is not None:
            count = iter(range(10**9))
            add = journal_module.Appender.add

            def dies(self: Any, entry: dict[str, Any]) -> None:
                if next(count) == kill_after:
                    self._file.write(json.dumps(entry).encode()[:-9])
                    self._file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                add(self, entry)

            journal_module.Appender.add = dies  # type: ignore[method-assign]
        regenerate(chosen)

    process = FORK.Process(target=work)
    process.start()
    return process


def ends(process: Any) -> int:
    process.join(60)
    return int(process.exitcode)


@pytest.mark.parametrize("worlds", [(1, 1, 1), (2, 1, 2), (1, 3, 2)])
def test_killed_twice_and_finished_nothing_is_lost_or_twice(
    tmp_path: Path, tiny: Target, worlds: tuple[int, int, int]
) -> None:
    whole = options(tmp_path, out=tmp_path / "whole.jsonl", temperature=[0.0, 1.0])
    regenerate(whole)
    chosen = options(tmp_path, temperature=[0.0, 1.0])
    for world, kill_after in zip(worlds, (2, 1, None), strict=True):
        assert not chosen.out.exists()
        processes = [in_a_process(chosen, rank, world, kill_after) for rank in range(world)]
        expected = 0 if kill_after is None else -signal.SIGKILL
        assert {ends(process) for process in processes} == {expected}
    assert written(chosen) == written(whole)
    records = [json.loads(Path(f"{one.out}.meta.json").read_text()) for one in (chosen, whole)]
    assert records[0] == records[1]
    assert left_in(chosen.out.parent) == ["out.jsonl", "out.jsonl.meta.json"]


@pytest.mark.parametrize("step", ["replacing", "write_json", "remove"])
def test_killed_while_the_result_is_written(tmp_path: Path, tiny: Target, step: str) -> None:
    chosen = options(tmp_path)

    def work() -> None:
        setattr(module, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        regenerate(chosen)

    process = FORK.Process(target=work)
    process.start()
    assert ends(process) == -signal.SIGKILL
    regenerate(chosen)
    assert len(written(chosen)) == 15 and left_in(chosen.out.parent) == ["out.jsonl", "out.jsonl.meta.json"]


def test_a_resumed_command_answers_only_what_is_missing(tmp_path: Path, tiny: Target) -> None:
    chosen = options(tmp_path)
    assert ends(in_a_process(chosen, kill_after=9)) == -signal.SIGKILL
    finished = Journal(chosen.out).finished()
    assert len(finished) == 9
    asked: list[int] = []
    answer = module.TargetWriter.answer

    def spy(self: Any, dialogues: Any, *others: Any) -> None:
        def seen() -> Any:
            for dialogue in dialogues:
                asked.append(dialogue.number)
                yield dialogue

        answer(self, seen(), *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.TargetWriter, "answer", spy)
        regenerate(chosen)
    assert sorted([*asked, *finished]) == list(range(15))


def test_other_settings_or_prompts_are_refused_and_the_same_may_decode_otherwise(tmp_path: Path, tiny: Target) -> None:
    assert ends(in_a_process(options(tmp_path), kill_after=2)) == -signal.SIGKILL
    with pytest.raises(UserError, match=r"out\.jsonl\.partial was begun with options\.seed = 0, now 1: .*delete"):
        regenerate(options(tmp_path, seed=1))
    with pytest.raises(UserError, match="was begun with digest"):
        regenerate(options(tmp_path, [*ROWS[:-1], {"turns": ["other"]}]))
    regenerate(options(tmp_path, batch_size=1))
    assert len(written(options(tmp_path))) == 15


def test_a_finished_file_is_not_written_again(tmp_path: Path, tiny: Target, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(tmp_path)
    meta = regenerate(chosen)
    before = chosen.out.stat().st_mtime_ns
    assert regenerate(chosen) == meta and chosen.out.stat().st_mtime_ns == before
    assert "is there already" in capsys.readouterr().out


def test_more_processes_than_conversations(tmp_path: Path, tiny: Target) -> None:
    chosen = options(tmp_path, ROWS[:2])
    assert {ends(process) for process in [in_a_process(chosen, rank, 4) for rank in range(4)]} == {0}
    assert len(written(chosen)) == 2 and left_in(chosen.out.parent) == ["out.jsonl", "out.jsonl.meta.json"]


def test_an_interrupted_command_ends_in_one_line(
    tmp_path: Path, tiny: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(journal_module.Appender, "add", interrupted)
    chosen = options(tmp_path)
    with pytest.raises(SystemExit) as error:
        main.main(["data", "regenerate", chosen.prompts, "-o", str(chosen.out), "--device", "cpu"])
    assert error.value.code == 130 and capsys.readouterr().err.endswith("spechead: interrupted\n")


@pytest.mark.slow
def test_two_processes_of_torchrun(tmp_path: Path) -> None:
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    texts = []
    for count in (1, 2):
        chosen = options(tmp_path, out=tmp_path / f"{count}.jsonl")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        command += ["-m", "spechead", "data", "regenerate", chosen.prompts, "-o", str(chosen.out)]
        command += ["--target", str(tmp_path / "target"), "--max-new-tokens", "8", "--device", "cpu"]
        subprocess.run([*command, "--temperature", "0", "--temperature", "1", "--dtype", "float32"], check=True)
        texts.append(written(chosen))
    assert len(texts[0]) == 15 and texts[0] == texts[1]


# ------------------------------------------------------------------------------------------------ by a server


def served(
    tmp_path: Path, script: Callable[[dict[str, Any], int], Reply] = echo, **changes: Any
) -> tuple[RegenerateOptions, dict[str, Any]]:
    """The options and the record of a command that asks a server."""
    with chat_server(script) as server:
        chosen = options(tmp_path, server=server.address, **changes)
        return chosen, regenerate(chosen)


def test_a_server_answers_in_the_order_of_the_source(tmp_path: Path) -> None:
    def script(request: dict[str, Any], times: int) -> Reply:
        last = request["messages"][-1]["content"]
        return Reply(completion(f"on {last}", token_ids=[9, 2]), delay_s=0.05 if "0" in last else 0.0)

    chosen, meta = served(tmp_path, script, concurrency=8)
    rows = written(chosen)
    assert [answer[0] for answer in answers(rows)[:12]] == [f"on what is {i}?" for i in range(12)]
    assert {len(row["messages"]) for row in rows[:12]} == {6} and rows[0]["answer_ids"] == [[9, 2]] * 3
    assert (meta["target"], meta["served"], meta["conversations"], meta["turns"]) == ("target", "target", 15, 40)
    assert "tokenizer" not in rows[0]["meta"] and "fingerprint" not in meta


def test_failed_conversations_are_asked_again_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: dict[str, Any], times: int) -> Reply:
        return Reply({}, 500) if "5" in request["messages"][0]["content"] else echo(request, times)

    remedy = r"1 of 15 conversations failed at http.*/v1: 1 status 500; the others are kept: the same command asks for"
    with pytest.raises(UserError, match=remedy):
        served(tmp_path, script, retries=0)
    assert not options(tmp_path).out.exists()
    chosen, meta = served(tmp_path, script, retries=0, allow_failures=True)  # and another port
    assert (meta["conversations"], meta["failed"]) == (14, {"status 500": 1})
    assert "1 failed (1 status 500)" in capsys.readouterr().out
    chosen.out.unlink()
    with pytest.raises(UserError, match="1 of 15"):
        served(tmp_path, script, retries=0)
    asked: list[str] = []

    def spy(request: dict[str, Any], times: int) -> Reply:
        asked.append(request["messages"][0]["content"])
        return echo(request, times)

    chosen, meta = served(tmp_path, spy)
    assert set(asked) == {"what is 5?"} and meta["conversations"] == 15 and not meta["failed"]


def test_refusals_and_retries_are_counted(tmp_path: Path) -> None:
    def script(request: dict[str, Any], times: int) -> Reply:
        last = request["messages"][-1]["content"]
        if last == "what is 1?":
            return Reply({"error": {"message": "too long"}}, 400)
        if last == "what is 2?" and times == 0:
            return Reply(b"junk", 200, {})
        return Reply(completion("a", "length")) if last == "what is 3?" else echo(request, times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spechead.data.synthesis.server.random.uniform", lambda *_: 0.01)
        chosen, meta = served(tmp_path, script)
    assert (meta["conversations"], meta["refused"], meta["truncated"]) == (14, 1, 1)
    assert meta["dropped"] == {"refused by the server: too long (status 400)": 1}
    assert meta["server"] == {"retries": 1, "unreadable answers": 1}
    assert written(chosen)[2]["meta"]["finish"] == "length"


def test_prompts_of_another_template_are_a_warning(
    tmp_path: Path, tiny: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(request: dict[str, Any], times: int) -> Reply:
        ids = tiny.chat.prompt_ids(request["messages"])
        return Reply(completion("ok") | {"prompt_token_ids": ids + [1] * (len(request["messages"]) == 1)})

    monkeypatch.setattr("spechead.target.options.load_tokenizer", lambda *_, **__: tiny.tokenizer)
    chosen, meta = served(tmp_path, script, target="folder/tiny", model="target")
    out = capsys.readouterr().out
    assert "warning: 14 of 40 prompts of the server differ from those that folder/tiny renders" in out
    row = written(chosen)[0]
    assert (row["meta"]["target"], row["meta"]["tokenizer"]) == ("folder/tiny", tiny.chat.tokenizer_digest)


def test_nothing_answered_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no conversation was answered \(15 refused by the server: no \(status 400\)\)"
    ):
        served(tmp_path, lambda *_: Reply({"error": "no"}, 400))
    assert list(options(tmp_path).out.parent.iterdir()) == []


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": []}, "option temperature: is empty"),
        ({"temperature": [0.5, -1.0]}, "option temperature: must be at least 0"),
        ({"top_p": 0.0}, "option top_p: must be above 0"),
        ({"max_new_tokens": 0}, "option max_new_tokens: must be"),
        ({"prompts": "none.jsonl"}, "none.jsonl: no such file"),
        ({"model": "target"}, "option model: belongs to --server"),
        ({"server": "http://x/v1", "chat_template": "{{ x }}"}, "option chat_template: the server has its own"),
        ({"server": "http://127.0.0.1:9"}, "option server: http://127.0.0.1:9 lacks the path, give"),
        ({"server": "http://127.0.0.1:9/v1"}, "option server: nothing answers at http://127.0.0.1:9/v1/models"),
    ],
)
def test_impossible_options_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        regenerate(options(tmp_path, **changes))
    assert not list(tmp_path.rglob("*.partial"))


def test_prompts_without_a_users_turn_are_one_line(tmp_path: Path, tiny: Target) -> None:
    with pytest.raises(UserError, match=r"has no row with a user's turn \(2 a plain document has no prompt, 1 not va"):
        regenerate(options(tmp_path, [{"text": "a"}, {"text": "b"}, "{"]))


def test_an_output_among_the_sources_is_refused(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    for source, out in ((chosen.prompts, Path(chosen.prompts)), (str(tmp_path), tmp_path / "new.jsonl")):
        with pytest.raises(UserError, match="option out: .* is read as a source"):
            options(tmp_path, prompts=source, out=out)
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="is a (folder|device or a pipe), name a file"):
            options(tmp_path, out=out)


def test_a_server_is_asked_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="option server: one process is enough"):
        options(tmp_path, server="http://x/v1")


def test_a_later_day_goes_on_with_the_date_of_the_first(
    tmp_path: Path, tiny: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dated = "{{ strftime_now('%Y-%m-%d') }}" + CHATML

    def load(cls: type[Target], name: str, **more: Any) -> Target:
        tiny.chat = ChatTemplate(tiny.tokenizer, dated, date=more["template_date"])
        return tiny

    monkeypatch.setattr(module.Target, "load", classmethod(load))
    meta = regenerate(options(tmp_path, template_date="2024-07-26"))
    assert meta["options"]["template_date"] == "2024-07-26"
    assert regenerate(options(tmp_path)) == meta
    assert "is there already, written with these settings" in capsys.readouterr().out


def test_a_result_of_other_settings_is_not_replaced(tmp_path: Path, tiny: Target) -> None:
    regenerate(options(tmp_path))
    before = options(tmp_path).out.read_bytes()
    with pytest.raises(UserError, match="option out: .*out.jsonl is there, and not of these settings; delete it"):
        regenerate(options(tmp_path, max_new_tokens=9))
    assert options(tmp_path).out.read_bytes() == before


def test_rows_with_tools_that_the_template_ignores_are_not_answered(tmp_path: Path, tiny: Target) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": user("what is 0?"), "tools": tools}, {"messages": user("what is 0?")}]
    meta = regenerate(options(tmp_path, rows))
    assert meta["conversations"] == 1
    assert [reason for reason in meta["dropped"] if "ignores tools" in reason]
