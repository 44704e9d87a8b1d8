"""Rows of files, folders and hub datasets: the same rows in every format, and what a fault costs."""

import errno
import gzip
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from spechead.data import sources
from spechead.data.conversation import Conversation
from spechead.data.messages import Unusable
from spechead.data.preparation.prepared import is_prepared
from spechead.data.sources import Row, hub_version, parse, read_rows
from spechead.data.template_record import recorded_template
from spechead.errors import UserError
from tests.data.test_conversation import rows as any_row


def chat(question: str, answer: str = "b") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def questions(source: Path | str, **options: Any) -> list[str]:
    return [parse(row).messages[0]["content"] for row in read_rows(str(source), **options)]


def outcomes(path: Path) -> list[tuple[str, str]]:
    """Where each row is, and its question or the reason why it cannot be used."""
    found = []
    for row in read_rows(str(path)):
        try:
            found.append((row.where.removeprefix(f"{path} "), parse(row).messages[0]["content"]))
        except Unusable as error:
            found.append((row.where.removeprefix(f"{path} "), error.reason))
    return found


# ------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.json", "x", "x.txt", "X.JSONL", "x.jsonl.gz", "x.json.gz"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n \r\n"])
def test_lines_are_read_under_any_name(tmp_path: Path, name: str, start: bytes) -> None:
    content = start + lines(chat("a"), b"", chat("c")) + json.dumps(chat("e")).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    skipped = start.count(b"\n")
    numbers = [1 + skipped, 3 + skipped, 4 + skipped]
    assert outcomes(tmp_path / name) == [(f"line {n}", q) for n, q in zip(numbers, "ace", strict=True)]


@pytest.mark.parametrize("name", ["x.json", "x", "x.json.gz"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf \n"])
def test_an_array_is_read_by_its_first_character(tmp_path: Path, name: str, start: bytes) -> None:
    content = start + json.dumps([chat("a"), 5, chat("c")], indent=1).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert outcomes(tmp_path / name) == [("row 1", "a"), ("row 2", "not an object"), ("row 3", "c")]


def test_parquet_is_read_in_batches_without_the_nulls_that_tables_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BATCH", 2)
    path = tmp_path / "x.parquet"
    calls = [{"name": "f", "arguments": {name: 1}} for name in "xyz"]
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
    asked = {"role": "user", "content": "a", "tool_calls": None}
    table = pyarrow.Table.from_pylist([{"messages": [asked, answer], "id": 5} for answer in answers])
    parquet.write_table(table, path)
    found = list(read_rows(str(path)))
    assert [row.where for row in found] == [f"{path} row {n}" for n in (1, 2, 3)]
    assert [list(row.value) for row in found] == [["messages"]] * 3
    arguments = [parse(row).messages[1]["tool_calls"][0]["function"]["arguments"] for row in found]
    assert arguments == [{"x": 1}, {"y": 1}, {"z": 1}]


def test_a_bad_value_of_parquet_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    text = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"prompt": text, "response": ["b"] * 3}), path)
    assert outcomes(path) == [("row 1", "a"), ("row 2", "a value that cannot be read"), ("row 3", "c")]


def test_parquet_without_a_known_column_says_so_for_each_row(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"question": ["a"], "when": [1]}), tmp_path / "x.parquet")
    assert outcomes(tmp_path / "x.parquet") == [("row 1", "no conversation in the row")]


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "c.jsonl").write_bytes(lines(chat("3")))
    (tmp_path / "b" / "deep" / "x.json.gz").write_bytes(gzip.compress(json.dumps([chat("2")]).encode()))
    parquet.write_table(pyarrow.table({"prompt": ["1"], "response": ["b"]}), tmp_path / "a.parquet")
    (tmp_path / "d.ndjson").write_bytes(b"")
    for name in ("README.md", "c.jsonl.meta.json", ".c.jsonl", ".hidden/x.jsonl", "x.csv", "x.gz"):
        (tmp_path / name).write_bytes(lines(chat("no")))
    assert questions(tmp_path) == ["1", "2", "3"]
    assert questions(tmp_path, limit=2) == ["1", "2"]


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(lines(chat("a"), chat("c"))))
    writer.start()
    assert questions(path) == ["a", "c"]
    writer.join()


def test_the_hub_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(chat("a"), chat("c")))
    (folder / "test.jsonl").write_bytes(lines(chat("e")))
    for streaming in (False, True):
        assert questions(f"hf:{folder}", streaming=streaming) == ["a", "c"]
        assert questions(f"hf:{folder}:test", streaming=streaming) == ["e"]
        assert questions(f"hf:{folder}", limit=1, streaming=streaming) == ["a"]
        with pytest.raises(UserError, match=r"^dataset hf:.*absent cannot be loaded: .*$"):
            questions(f"hf:{folder}:absent", streaming=streaming)
    assert next(read_rows(f"hf:{folder}")).where == f"hf:{folder} row 1"


# ------------------------------------------------------------------------------------------------ faults

FAULTS = {
    b'{"messages": [': "not valid JSON",
    b"\0\0\0": "not valid JSON",
    b'\xef\xbb\xbf{"text": "a"}': "not valid JSON",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "\xed\xa0\x80"}': "not UTF-8",
    b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'{"text": "a", "x": ' + b"1" * 5000 + b"}": "a number of too many digits",
    b'{"text": "a", "meta": {"x": NaN}}': "NaN or infinity",
    b'{"text": "a", "meta": ' + b'{"x":' * 150 + b"1" + b"}" * 151: "nested too deeply",
    b"[1, 2]": "not an object",
    b"7": "not an object",
}


@pytest.mark.parametrize(("line", "reason"), FAULTS.items())
def test_a_fault_of_one_line_costs_that_row(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(chat("a"), line, chat("c")))
    assert outcomes(path) == [("line 1", "a"), ("line 2", reason), ("line 3", "c")]


def test_numbers_that_are_not_finite_pass_where_they_do_not_matter() -> None:
    assert parse(Row("x", b'{"text": "a", "score": NaN, "loss": -Infinity}')) == Conversation([], text="a")


def test_a_file_cut_inside_a_character_loses_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    whole = lines(chat("a")) + json.dumps(chat("ä"), ensure_ascii=False).encode()
    path.write_bytes(whole[: whole.index("ä".encode()) + 1])
    assert outcomes(path) == [("line 1", "a"), ("line 2", "not UTF-8")]


def test_a_line_that_is_too_long_is_skipped_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(chat("a"), chat("b" * 5000), chat("c"), chat("d" * 5000))[:-1])
    monkeypatch.setattr(sources, "LONGEST_LINE", 1000)
    reason = "longer than 0 MB"
    assert outcomes(path) == [("line 1", "a"), ("line 2", reason), ("line 3", "c"), ("line 4", reason)]


def test_a_limit_counts_rows_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(b"", b"{", chat("c"), chat("e")))
    assert [row.where[-6:] for row in read_rows(str(tmp_path / "x.jsonl"), limit=2)] == ["line 2", "line 3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "cannot read .*absent.jsonl: no such file or folder"),
        ("absent.parquet", None, "cannot read .*absent.parquet: no such file or folder"),
        ("x.jsonl", b"", r"x.jsonl: contains no conversation"),
        ("x.jsonl", b"\n\n", r"x.jsonl: contains no conversation"),
        ("x.json", b"[]", r"x.json: contains no conversation"),
        ("x.json", b'[{"text": "a"}', r"x.json: not valid JSON: .*"),
        ("x.json", b'["\xff"]', r"x.json: not UTF-8: .*"),
        ("x.json", b"[" * 100_000, r"x.json: nested too deeply"),
        ("x.jsonl.gz", b"plain", r"cannot read .*x.jsonl.gz: Not a gzipped file .*"),
        ("x.jsonl.gz", gzip.compress(b"abc" * 999)[:-9], r"cannot read .*x.jsonl.gz: .*"),
        ("x.jsonl.gz", gzip.compress(b"abc")[:10] + b"\xff" * 9, r"cannot read .*x.jsonl.gz: .*"),
        ("x.parquet", b"PAR1 but not", r"cannot read .*x.parquet: .*"),
        ("x.parquet", b"", r"cannot read .*x.parquet: .*"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        questions(tmp_path / name)
    [line] = str(error.value).splitlines()
    assert re.search(f"{message}$", line), line


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_bytes(lines(chat("a")))
    assert questions(".") == ["a"]
    with pytest.raises(UserError, match="the name of a data source is empty"):
        questions("")


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(UserError, match=r"the folder has no data file: \.jsonl"):
        questions(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b.jsonl", "x" * 5000 + ".parquet"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="^cannot read "):
        questions(Path(name))
    assert not is_prepared(name) and recorded_template(name) is None


def test_no_data_file_of_a_folder_is_left_out(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "x.jsonl").write_bytes(lines(chat(place.name)))
    (folder / "again").symlink_to(folder)
    (folder / "linked").symlink_to(elsewhere)
    assert sorted(questions(folder)) == ["data", "elsewhere"]
    (folder / "y.jsonl").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match=r"cannot read .*y\.jsonl: no such file or folder"):
        questions(folder)


def test_a_folder_below_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "x.jsonl").write_bytes(lines(chat("a")))
    listed = Path.iterdir

    def refuse(folder: Path) -> Iterator[Path]:
        if folder.name == "closed":
            raise PermissionError(errno.EACCES, "no", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"cannot read .*closed: permission denied"):
        questions(tmp_path)


def test_a_hub_dataset_needs_a_name() -> None:
    for read in (lambda: list(read_rows("hf:")), lambda: hub_version("hf::test")):
        with pytest.raises(UserError, match="names no dataset, give it as hf:NAME"):
            read()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | any_row.map(lambda row: json.dumps(row).encode()), st.booleans())
def test_any_bytes_are_a_conversation_or_unusable(line: bytes, answered: bool) -> None:
    try:
        assert isinstance(parse(Row("x", line), answered=answered), Conversation)
    except Unusable as error:
        assert error.reason


@pytest.mark.parametrize("name", ["a.csv", "README.md", "weights.safetensors"])
def test_files_of_other_formats_are_named_as_such(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a,b\n")
    with pytest.raises(UserError, match=f"{name}: is of a format that is not read; give .jsonl, .ndjson, .json"):
        list(read_rows(str(tmp_path / name)))
