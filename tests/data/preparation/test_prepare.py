"""Prepared data sets: written once, found again, refused where they do not fit."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spechead.cli import main
from spechead.data.preparation import prepare as module
from spechead.data.preparation.prepare import Preparation, cut_at_positions, prepare, remarks
from spechead.data.preparation.prepared import IDS, INDEX, open_prepared
from spechead.errors import UserError
from spechead.target.chat_template import ChatTemplate
from tests.data.preparation.test_row_encoder import FORGETS, chat_row
from tests.helpers.processes import begin, end
from tests.helpers.targets import make_target, make_toy_tokenizer
from tests.test_pool import alive


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def preparation(tmp_path: Path) -> Preparation:
    """Two sources: three chats, one of them empty; and a chat that is seen twice."""
    one = write(tmp_path / "one.jsonl", [chat_row("Hi", "Yo"), chat_row("Hi", " "), chat_row("Hi", "A" * 99)])
    two = write(tmp_path / "two.jsonl", [chat_row("So", "No", meta={"target": "m", "kind": "k"})])
    return Preparation([one, two], ChatTemplate(make_toy_tokenizer()), 60, weights=[1, 2], vocab_size=97)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECHEAD_PREPARED", str(tmp_path / "cache"))
    return tmp_path / "cache"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


# ------------------------------------------------------------------------------------------------ writing


def test_samples_stand_in_the_order_of_the_sources(preparation: Preparation, tmp_path: Path) -> None:
    data = prepare(preparation, tmp_path / "set")
    assert data.samples.rows.tolist() == [0, 2, 3, 3]
    assert [data.samples.place(row) for row in (0, 2, 3)] == [
        f"{tmp_path}/one.jsonl line 1",
        f"{tmp_path}/one.jsonl line 3",
        f"{tmp_path}/two.jsonl line 1",
    ]
    some = ("rows", "usable", "samples", "truncated", "longest")
    assert [data.counts[name] for name in some] == [4, 3, 4, 1, 60]
    assert data.counts["tokens"] == sum(map(len, (data.samples[i].ids for i in (0, 1, 2))))
    assert data.written_by == {"": 2, "m": 1} and data.samples.kinds() == {"": 2, "k": 1}
    assert data.index["settings"]["weights"] == [1, 2] and data.index["template"]["template_kwargs"] == {}


def test_a_path_that_can_be_written_otherwise_is_named_as_the_reader_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preparation: Preparation
) -> None:
    monkeypatch.chdir(tmp_path)
    data = prepare(replace(preparation, sources=["./one.jsonl", str(tmp_path)], weights=[]))
    assert data.samples.place(0) in ("one.jsonl line 1", "./one.jsonl line 1")
    assert data.samples.place(5) == f"{tmp_path}/one.jsonl line 3"


def test_what_is_worth_knowing_is_said_in_lines(preparation: Preparation, tmp_path: Path) -> None:
    rows = [chat_row("Hi", "Yo\ud800"), *[chat_row("Hi")] * 4, chat_row("Hi", "Yo", "Ha", "No")]
    source = write(tmp_path / "rows.jsonl", rows)
    chat = ChatTemplate(make_toy_tokenizer(), FORGETS)
    asked = replace(preparation, sources=[source], weights=[], chat=chat, positions=50)
    lines = remarks(prepare(asked, tmp_path / "set"))
    places = ", ".join(f"{source} line {number}" for number in (2, 3, 4))
    assert lines[0] == f"4 of 6 conversations dropped, no assistant turn: {places}, ..."
    assert any(line.startswith("2 samples of turns that the template rewrites") for line in lines)
    assert lines[-1] == "1 halves of surrogate pairs, which are no text, replaced by U+FFFD"
    assert cut_at_positions(asked) == ["samples are cut at the target's 50 positions, below max_length 60"]
    assert cut_at_positions(preparation) == []


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        (
            [chat_row("Hi", "Yo"), chat_row("Hi")],
            20,
            r"^none of 2 conversations can be used: 1 too long, 1 no assistant turn; "
            r"raise data.max_length, which is 20$",
        ),
        ([chat_row("Hi")], 20, r"^none of 1 conversations can be used: 1 no assistant turn; `spechead data regen"),
        (["{"], 20, r"1 not valid JSON; Expecting"),
        ([{"prompt": "a", "response": "b", "images": [1]}], 20, "1 column images is not supported"),
        ([""], 20, r"contains no conversation"),
    ],
)
def test_a_set_without_samples_is_an_error_that_says_why(
    tmp_path: Path, rows: list[Any], length: int, message: str
) -> None:
    chat = ChatTemplate(make_toy_tokenizer())
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=message):
        prepare(Preparation([source], chat, length, vocab_size=97, prefix="data."), tmp_path / "set")
    assert visible(tmp_path) == ["a.jsonl"]


def test_the_remedy_is_not_a_length_that_the_target_lacks(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat_row("Hi" * 90, "Yo")])
    with pytest.raises(UserError, match="1 too long; the target has 30 positions"):
        prepare(Preparation([source], ChatTemplate(make_toy_tokenizer()), 512, positions=30), tmp_path / "set")


def test_a_template_that_refuses_all_is_quoted(tmp_path: Path) -> None:
    template = "{{ raise_exception('not that') }}"
    source = write(tmp_path / "a.jsonl", [chat_row("Hi", "Yo")])
    with pytest.raises(UserError, match="1 refused by the chat template; .*not that"):
        prepare(Preparation([source], ChatTemplate(make_toy_tokenizer(), template), 60), tmp_path / "set")


def test_reasons_that_quote_the_data_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REASONS", 3)
    rows = [{"messages": [{"role": f"r{i}", "content": "a"}]} for i in range(9)] + [chat_row("Hi", "Yo")]
    source = write(tmp_path / "a.jsonl", rows)
    data = prepare(Preparation([source], ChatTemplate(make_toy_tokenizer()), 60), tmp_path / "set")
    assert sorted(data.dropped.values()) == [1, 1, 1, 6] and data.dropped["other reasons"] == 6


def test_strict_refuses_the_first_row_that_cannot_be_used(preparation: Preparation, cache: Path) -> None:
    line = f"^{preparation.sources[0]} line 2: empty answer \\(option data.strict\\)$"
    strict = replace(preparation, strict=True, prefix="data.")
    with pytest.raises(UserError, match=line):
        prepare(strict)
    assert visible(cache) == []
    prepare(preparation)
    with pytest.raises(UserError, match=line):
        prepare(strict)


# ------------------------------------------------------------------------------------------------ finding


def test_a_set_is_found_by_its_content(
    preparation: Preparation, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = prepare(preparation)
    assert visible(cache) == [first.index["key"]]
    monkeypatch.setattr(module, "write", lambda *_: pytest.fail("written again"))
    Path(preparation.sources[0]).rename(tmp_path / "moved.jsonl")
    again = prepare(replace(preparation, sources=[str(tmp_path / "moved.jsonl"), preparation.sources[1]]))
    assert again.samples.place(0) == f"{tmp_path}/moved.jsonl line 1"
    assert again.folder == first.folder and again.dropped == first.dropped


def test_other_content_is_another_set(preparation: Preparation, cache: Path) -> None:
    for n in (1, 2, 3):
        prepare(replace(preparation, max_length=50 + n))
        assert len(visible(cache)) == n


def test_a_damaged_set_in_the_cache_is_written_anew(preparation: Preparation, cache: Path) -> None:
    data = prepare(preparation)
    ids = data.ids.tolist()
    (data.folder / IDS).write_bytes(b"")
    assert prepare(preparation).ids.tolist() == ids
    (data.folder / INDEX).unlink()
    assert prepare(preparation).ids.tolist() == ids


def test_a_named_folder_is_replaced_if_it_is_a_prepared_set(preparation: Preparation, tmp_path: Path) -> None:
    prepare(preparation, tmp_path / "set")
    assert prepare(replace(preparation, max_length=50), tmp_path / "set").counts["longest"] == 50
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"option out: .* exists and is no prepared data set, give another folder"):
        prepare(preparation, tmp_path / "mine")
    inside = replace(preparation, sources=[str(tmp_path)], weights=[])
    for asked, name in ((preparation, "one.jsonl"), (inside, "set")):
        with pytest.raises(UserError, match=r"option out: .* is inside the source .*, give a folder elsewhere"):
            prepare(asked, tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert prepare(preparation, tmp_path / "empty").counts["samples"] == 4


# ------------------------------------------------------------------------------------------------ a set as the source


def test_a_prepared_set_is_a_source(preparation: Preparation, tmp_path: Path, cache: Path) -> None:
    data = prepare(preparation, tmp_path / "set")
    source = replace(preparation, sources=[str(tmp_path / "set")], weights=[])
    opened = prepare(source)
    assert opened.samples.table.tolist() == data.samples.table.tolist() and not cache.exists()
    assert opened.samples.place(0) == data.samples.place(0)


KWARGS = ChatTemplate(make_toy_tokenizer(), keywords={"a": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat": KWARGS}, r"was prepared with template_kwargs \{\}, here it is \{'a': 1\}; prepare it again"),
        ({"chat": ChatTemplate(make_toy_tokenizer(), FORGETS)}, "was prepared with another chat template"),
        ({"vocab_size": 50}, r"contains the id 96, the target's embedding has 50 rows"),
        ({"max_length": 59}, r"option data.max_length: 59 is below the longest sample of .*, 60 tokens; raise it"),
        ({"positions": 40}, r"option data.max_length: 40 is below"),
        ({"weights": [2]}, r"option data.weights: applies to conversations, .* is prepared; leave it out"),
        ({"limit": 2}, r"option data.limit: applies to conversations"),
        ({"history": "last"}, r"option data.history: applies to conversations"),
        ({"strict": True}, r"one.jsonl line 2: empty answer \(option data.strict\)"),
        ({"sources": ["{set}", "other.jsonl"]}, "is prepared, and cannot be combined with other sources"),
    ],
)
def test_a_prepared_set_that_does_not_fit_is_refused_with_the_difference(
    preparation: Preparation, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    prepare(preparation, tmp_path / "set")
    changes = {"sources": ["{set}"], "weights": []} | changes
    changes["sources"] = [name.format(set=tmp_path / "set") for name in changes["sources"]]
    with pytest.raises(UserError, match=message) as error:
        prepare(replace(preparation, prefix="data.", **changes))
    assert "\n" not in str(error.value)


def test_another_tokenizer_or_template_of_its_own_is_named(preparation: Preparation, tmp_path: Path) -> None:
    prepare(preparation, tmp_path / "set")
    tokenizer = make_toy_tokenizer()
    tokenizer.add_tokens(["abc"])
    source = replace(preparation, sources=[str(tmp_path / "set")], weights=[])
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        prepare(replace(source, chat=ChatTemplate(tokenizer)))
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = FORGETS
    with pytest.raises(UserError, match="was prepared with another chat template; prepare it again for this target"):
        prepare(replace(source, chat=ChatTemplate(tokenizer)))
    with pytest.raises(UserError, match="cannot be combined with other sources or prepared again"):
        prepare(source, tmp_path / "again")


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, folder = make_target(), tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def test_the_command_prints_what_it_did(
    preparation: Preparation, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    words = ["data", "prepare", *preparation.sources, "-o", str(out), "--target", str(tiny)]
    main.main([*words, "--max-length", "300", "--weights", "[1, 2]"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "samples are cut at the target's 256 positions, below max_length 300"
    assert lines[1] == f"1 of 4 conversations dropped, empty answer: {preparation.sources[0]} line 2"
    assert lines[2].startswith(f"{out}: 4 samples of 3 conversations, ") and lines[2].endswith(" of them to learn")
    settings = {"max_length": 256, "vocab_size": 97, "weights": [1, 2], "history": "each", "limit": 0, "seed": 0}
    assert open_prepared(out).index["settings"] == settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{one}"], "option out: is empty, name the folder to write with -o"),
        (["-o", "{out}"], "the following arguments are required: sources"),
        (["{one}", "{two}", "-o", "{out}", "--weights", "[1]"], "option weights: 1 values for 2 sources"),
        (["{one}", "-o", "{out}", "--weights", "[0]"], "option weights: must be above 0, got [0.0]"),
        (["{one}", "-o", "{out}", "--strict"], "one.jsonl line 2: empty answer (option strict)"),
        (["{one}", "-o", "{out}", "--max_length", "5"], "raise max_length, which is 5"),
        (["{none}", "-o", "{out}"], "cannot read {none}: no such file or folder"),
    ],
)
def test_mistakes_are_one_line(
    preparation: Preparation,
    tiny: Path,
    tmp_path: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = dict(zip(("one", "two"), preparation.sources, strict=True))
    names |= {"out": str(tmp_path / "out"), "none": str(tmp_path / "none.jsonl")}
    with pytest.raises(SystemExit) as exit_:
        main.main(["data", "prepare", *(word.format(**names) for word in words), "--target", str(tiny)])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and message.format(**names) in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ several processes

SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from spechead.data.preparation import prepare as module, row_encoder
from spechead.target.chat_template import ChatTemplate
from tests.helpers.targets import make_toy_tokenizer
write, encode = module.write, row_encoder.RowEncoder.encode

def slow_write(*arguments):
    print("writes", flush=True)
    time.sleep(1)
    write(*arguments)

def slow_encode(self, task):
    time.sleep(0.01)
    return encode(self, task)

module.write = slow_write
if len(sys.argv) > 2:
    row_encoder.SMALL_ROWS, row_encoder.RowEncoder.encode = 0, slow_encode
chat = ChatTemplate(make_toy_tokenizer())
out = Path(sys.argv[2]) if len(sys.argv) > 2 else None
data = module.prepare(module.Preparation([sys.argv[1]], chat, 60, workers=2), out)
print(len(data.samples))
"""


@pytest.mark.slow
def test_of_two_processes_one_writes_and_both_read(tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat_row("Hi", f"{i}") for i in range(20)])
    outputs = [process.communicate(timeout=60) for process in (begin(SCRIPT, source), begin(SCRIPT, source))]
    assert sorted(out.split() for out, _ in outputs) == [["20"], ["writes", "20"]], outputs
    assert len(visible(cache)) == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_preparation_leaves_no_process_and_no_set(tmp_path: Path, sent: signal.Signals) -> None:
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "set"
    source = write(tmp_path / "a.jsonl", [chat_row("Hi", f"{i}") for i in range(5000)])
    process = begin(SCRIPT, source, str(out))
    deadline = time.monotonic() + 60
    while not (workers := children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert workers
    time.sleep(0.2)
    end(process, sent)
    assert process.returncode == -sent
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, workers)) and not out.exists()
    if sent == signal.SIGINT:
        assert visible(out.parent) == []
    data = prepare(Preparation([write(tmp_path / "b.jsonl", [chat_row("Hi", "Yo")])], chat_of_toy(), 60), out)
    assert len(data.samples) == 1 and visible(out.parent) == ["set"], "what was left is gone"


def chat_of_toy() -> ChatTemplate:
    return ChatTemplate(make_toy_tokenizer())


def children(pid: int) -> list[int]:
    """The processes that a process has begun."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
        except OSError:
            pass
    return found


# ------------------------------------------------------------------------------------------------ many faulty rows

MESSAGES = "messages"
FAULTS: dict[str, Callable[[], Any]] = {
    "not valid JSON": lambda: "{",
    "not an object": lambda: [1],
    "no conversation in the row": lambda: {"question": "a"},
    "the conversation is empty": lambda: {MESSAGES: []},
    "messages is not a list": lambda: {MESSAGES: 5},
    "a message is not an object": lambda: {MESSAGES: ["Hi"]},
    "a message without a role": lambda: {MESSAGES: [{"content": "Hi"}]},
    "unknown role 'robot'": lambda: {MESSAGES: [{"role": "robot", "content": "Hi"}]},
    "a message without content": lambda: {MESSAGES: [{"role": "user"}]},
    "content that is not text": lambda: {MESSAGES: [{"role": "user", "content": [{"type": "image_url"}]}]},
    "the assistant speaks first": lambda: {MESSAGES: [{"role": "assistant", "content": "Hi"}]},
    "only the system speaks": lambda: {MESSAGES: [{"role": "system", "content": "Hi"}]},
    "no assistant turn": lambda: chat_row("Hi"),
    "empty answer": lambda: chat_row("Hi", " "),
    "meta is not an object": lambda: chat_row("Hi", "Yo", meta=5),
    "tools are not a list of objects": lambda: chat_row("Hi", "Yo", tools=[5]),
    "column images is not supported": lambda: chat_row("Hi", "Yo", images=["x"]),
    "answer_ids do not fit the answers": lambda: chat_row("Hi", "Yo", answer_ids=[]),
    "two system texts": lambda: {"system": "a"} | {MESSAGES: [{"role": "system", "content": "b"}]},
    "too long": lambda: chat_row("Hi" * 90, "Yo"),
    "too short": lambda: {"text": "a"},
    "the document is empty": lambda: {"text": " "},
    "NaN or infinity": lambda: chat_row("Hi", "Yo", meta={"x": float("nan")}),
}


def write_faulty(path: Path, count: int) -> str:
    """`count` rows, every tenth of which has one of the faults in turn."""
    faults = list(FAULTS.values())
    with path.open("w") as file:
        for number in range(count):
            row = faults[number // 10 % len(faults)]() if number % 10 == 5 else chat_row(f"ask {number}", "yes " * 6)
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    return str(path)


@pytest.mark.slow
def test_every_kind_of_fault_is_counted_under_its_own_reason(tmp_path: Path) -> None:
    count = 5000
    source = write_faulty(tmp_path / "a.jsonl", count)
    data = prepare(Preparation([source], chat_of_toy(), 100, vocab_size=97, workers=2), tmp_path / "set")
    each = [len(range(10 * i + 5, count, 10 * len(FAULTS))) for i in range(len(FAULTS))]
    assert data.dropped == dict(zip(FAULTS, each, strict=True))
    assert data.counts["rows"] == count and data.counts["usable"] == count - count // 10
    for i, why in enumerate(FAULTS):
        first = 10 * i + 6
        step = 10 * len(FAULTS)
        assert data.dropped_at(why) == [f"{source} line {first + k * step}" for k in range(3)]


def test_a_folder_with_a_name_that_none_can_have_is_refused(preparation: Preparation, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write .*: File name too long"):
        prepare(preparation, tmp_path / ("x" * 300))


def test_a_source_that_changes_while_it_is_read_is_not_kept_as_what_it_was(
    preparation: Preparation, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set = module.write

    def change_first(*arguments: Any) -> None:
        write(tmp_path / "two.jsonl", [chat_row("So", "No"), chat_row("Hi", "Yo")])
        write_set(*arguments)

    monkeypatch.setattr(module, "write", change_first)
    with pytest.raises(UserError, match="two.jsonl: has changed while it was read; start again"):
        prepare(preparation)
    assert visible(cache) == []
