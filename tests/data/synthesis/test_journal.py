"""The journal of finished conversations: half-written lines, other settings, other processes."""

import json
import os
from pathlib import Path

import pytest

from spechead.data.synthesis.journal import Entries, Journal, check_out
from spechead.errors import UserError
from spechead.files import write_json

SETTINGS = {"target": "tiny", "options": {"seed": 0}}


def add(journal: Journal, *numbers: int) -> None:
    with journal.appending() as appender:
        for number in numbers:
            appender.add({"number": number, "text": f"é{number}"})


def test_a_folder_that_takes_no_files_is_one_line() -> None:
    with pytest.raises(UserError, match="cannot make the folder /proc/out.jsonl.partial: no such file"):
        Journal(Path("/proc/out.jsonl")).begin(SETTINGS)


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for out, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "a device or a pipe")):
        with pytest.raises(UserError, match=f"option out: .* is {kind}, name a file"):
            check_out(out)
    (tmp_path / "out").write_text("")
    check_out(tmp_path / "out")
    check_out(tmp_path / "new")


def test_entries_of_all_processes_are_found_by_number(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    add(Journal(out, 0), 4, 0)
    add(Journal(out, 1), 1)
    add(Journal(out, 0), 2)
    finished = Journal(out).finished()
    assert sorted(finished) == [0, 1, 2, 4]
    with Entries() as entries:
        assert [entries.read(finished[i])["text"] for i in sorted(finished)] == ["é0", "é1", "é2", "é4"]


@pytest.mark.parametrize("torn", [b'{"number": 7, "text": "h', b'{"number": 7}', b"\xff"])
def test_a_half_written_line_is_not_counted_and_goes_before_the_next(tmp_path: Path, torn: bytes) -> None:
    out = tmp_path / "out.jsonl"
    add(Journal(out), 0, 1)
    path = next(tmp_path.rglob("conversations.journal"))
    with path.open("ab") as file:
        file.write(torn)
    assert sorted(Journal(out).finished()) == [0, 1]
    add(Journal(out), 7)
    assert sorted(Journal(out).finished()) == [0, 1, 7]
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 7]


def test_lines_that_are_no_entries_are_not_counted(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    add(Journal(out), 0)
    path = next(tmp_path.rglob("conversations.journal"))
    with path.open("ab") as file:
        file.write(b'\0\0\0\n[]\n{"number": "x"}\n{"text": 1}\n')
    add(Journal(out), 1)
    assert sorted(Journal(out).finished()) == [0, 1]


def test_a_conversation_that_two_processes_finished_counts_once(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    add(Journal(out, 1), 3)
    add(Journal(out, 0), 3)
    assert list(Journal(out).finished()) == [3]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl")
    assert journal.begin(SETTINGS) == {} and not journal.gone
    add(journal, 3)
    assert list(journal.begin(SETTINGS) or ()) == [3]
    with pytest.raises(UserError, match=r"out\.jsonl\.partial was begun with options\.seed = 0, now 1: keep the old"):
        journal.begin({"target": "tiny", "options": {"seed": 1}})


def test_a_finished_file_is_known_by_its_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl")
    journal.out.write_text("{}\n")
    with pytest.raises(UserError, match="option out: .* is there, and not of these settings"):
        journal.begin(SETTINGS)  # of unknown origin
    write_json(journal.meta, SETTINGS | {"conversations": 1})
    assert journal.begin(SETTINGS) is None
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.meta.json"}
    with pytest.raises(UserError, match="option out: .* is there, and not of these settings"):
        journal.begin(SETTINGS | {"target": "another"})


def test_two_processes_of_one_number_exclude_each_other(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, 0).appending():
        with pytest.raises(UserError, match=r"option out: another process writes to .*process-0"):
            add(Journal(out, 0), 1)
        add(Journal(out, 1), 1)
