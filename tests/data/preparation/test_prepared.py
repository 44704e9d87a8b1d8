"""The files of a prepared data set: written, read, split, and refused where they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.data.dataset import Sample, digest
from spechead.data.preparation.prepared import (
    IDS,
    INDEX,
    SAMPLES,
    SUPERVISED,
    Prepared,
    PreparedSamples,
    is_prepared,
    open_prepared,
    split_validation,
    writing,
)
from spechead.errors import UserError

INDEX_OF_TEST: dict[str, Any] = {
    "key": "k",
    "sources": ["a.jsonl"],
    "settings": {},
    "template": {},
    "counts": {"rows": 4},
    "dropped": {"too long": {"count": 1, "places": [[3, 0, 4]], "detail": "too long"}},
    "notes": {},
    "written by": {"m": 2, "": 1},
    "places": [[0, " line"], [-1, "elsewhere row"]],
    "kinds": ["coding", ""],
    "writers": ["m", ""],
}


def write(folder: Path) -> Path:
    """Three samples of the conversations 0, 0 and 2; the last twice."""
    with writing(folder) as writer:
        for ids, repeats, record in (
            ([5, 6, 7], 1, (0, 0, 1, 0, 0)),
            ([5, 9], 1, (0, 0, 1, 0, 0)),
            ([1, 2, 3, 4], 2, (2, 1, 8, 1, 1)),
        ):
            writer.add(np.array(ids, np.int32), np.arange(len(ids)) > 0, repeats, *record)
        writer.finish(INDEX_OF_TEST)
    return folder


def samples_of(rows: list[int], lengths: list[int] | None = None) -> PreparedSamples:
    """In memory: a sample for each of the rows, its ids those from its place on."""
    fields = [(3 * i, (lengths or [3] * len(rows))[i], row, 0, 0, 0, 0) for i, row in enumerate(rows)]
    names = ("start", "length", "row", "place", "number", "kind", "writer")
    table = np.array(fields, np.dtype([(name, "<i8") for name in names]))
    ids = np.arange(3 * len(rows), dtype=np.int32)
    return Prepared(Path(), INDEX_OF_TEST | {"counts": {"max id": len(ids)}}, ids, ids % 3 > 0, table).samples


# ------------------------------------------------------------------------------------------------ reading


def test_what_was_written_is_read(tmp_path: Path) -> None:
    data = open_prepared(write(tmp_path / "set"))
    samples = data.samples
    assert [sample.ids.tolist() for sample in samples] == [[5, 6, 7], [5, 9], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert [sample.row for sample in samples] == [0, 0, 2, 2] == samples.rows.tolist()
    first = samples[0]
    assert (first.ids.dtype, first.supervised.dtype) == (torch.int64, torch.bool)
    assert first.supervised.tolist() == [False, True, True] and samples.lengths.tolist() == [3, 2, 4, 4]
    sizes = {"samples": 4, "tokens": 9, "supervised tokens": 6, "longest": 4, "max id": 9}
    assert data.counts == {"rows": 4} | sizes and data.dropped == {"too long": 1}
    assert is_prepared(str(tmp_path / "set")) and not is_prepared(str(tmp_path))


def test_samples_are_a_sequence_whose_parts_are_as_well(tmp_path: Path) -> None:
    samples = open_prepared(write(tmp_path / "set")).samples
    assert samples[-1].ids.tolist() == [1, 2, 3, 4] and len(samples) == 4
    part = samples[1:3]
    assert isinstance(part, PreparedSamples) and [len(sample.ids) for sample in part] == [2, 4]
    assert samples.take(np.array([3, 0]))[1].ids.tolist() == [5, 6, 7]
    assert len(samples[:0]) == 0 and not samples[:0]
    with pytest.raises(IndexError):
        _ = samples[4]


def test_a_sample_may_be_changed_without_changing_the_files(tmp_path: Path) -> None:
    samples = open_prepared(write(tmp_path / "set")).samples
    samples[0].ids[0], samples[0].supervised[0] = 8, True
    assert samples[0].ids[0] == 5 and not samples[0].supervised[0]


def test_conversations_are_named_by_their_place_where_the_sources_are_now(tmp_path: Path) -> None:
    write(tmp_path / "set")
    data = open_prepared(tmp_path / "set")
    assert data.samples.place(0) == "a.jsonl line 1" and data.samples.place(2) == "elsewhere row 8"
    assert data.dropped_at("too long") == ["a.jsonl line 4"] and data.first_dropped() == ("a.jsonl line 4", "too long")
    assert open_prepared(tmp_path / "set", ["b/moved.jsonl"]).samples.place(0) == "b/moved.jsonl line 1"


def test_kinds_and_writers_are_counted_by_conversation(tmp_path: Path) -> None:
    data = open_prepared(write(tmp_path / "set"))
    assert data.samples.kinds() == {"coding": 1, "": 1} and data.samples.kind(3) == ""
    assert data.samples.written_by() == {"m": 1, "": 1} and data.samples[:2].written_by() == {"m": 1}
    assert data.written_by == {"m": 2, "": 1}


def test_a_writer_that_fails_leaves_the_earlier_set(tmp_path: Path) -> None:
    write(tmp_path / "set")
    with pytest.raises(KeyboardInterrupt), writing(tmp_path / "set") as writer:
        writer.add(np.array([1], np.int32), np.array([True]), 1, 0, 0, 0, 0, 0)
        raise KeyboardInterrupt
    assert len(open_prepared(tmp_path / "set").samples) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


# ------------------------------------------------------------------------------------------------ damage


def change(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(index | values))

    return apply


def shorten(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])

    return apply


def retable(field: str, value: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        table = np.load(folder / SAMPLES)
        table[field][1] = value
        np.save(folder / SAMPLES, table)

    return apply


HEADER = b"\x93NUMPY\x01\x00\x0f\x00"  # of 15 bytes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / INDEX).unlink(), "is no prepared data set, it has no index.json"),
        (lambda folder: (folder / INDEX).write_text("[]"), "is no prepared data set"),
        (lambda folder: (folder / INDEX).write_text("{"), "index.json is not valid JSON"),
        (change(format="other"), "is no prepared data set"),
        (change(schema=0), "was prepared by another version of spechead"),
        (change(dropped=None), "is damaged, index.json has no dropped"),
        (change(counts={}), "is damaged, 'tokens'"),
        (change(kinds=[]), "do not belong together"),
        (lambda folder: (folder / IDS).unlink(), "cannot be read, no such file"),
        (lambda folder: (folder / SAMPLES).unlink(), "cannot be read, no such file"),
        (lambda folder: (folder / SAMPLES).write_bytes(b"no"), "is damaged, "),
        (lambda folder: (folder / SAMPLES).write_bytes(b""), "is damaged, "),
        (lambda folder: (folder / SAMPLES).write_bytes(HEADER + b"{'descr': (((("), "is damaged, "),
        (lambda folder: np.save(folder / SAMPLES, np.zeros(4)), "samples.npy does not have 4 records"),
        (lambda folder: (folder / IDS).write_bytes(b""), "is damaged, "),
        (shorten(IDS), "is damaged, "),
        (shorten(SUPERVISED), "do not have 9 entries"),
        (retable("length", 90), "a sample of samples.npy is outside the 9 tokens"),
        (retable("start", -1), "a sample of samples.npy is outside"),
    ],
)
def test_a_damaged_set_is_an_error_of_one_line(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = write(tmp_path / "set")
    damage(folder)
    with pytest.raises(UserError) as error:
        open_prepared(folder)
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("foreign", [-1, 10])
def test_ids_that_were_never_written_are_no_sample(tmp_path: Path, foreign: int) -> None:
    folder = write(tmp_path / "set")
    ids = np.fromfile(folder / IDS, np.int32)
    ids[4] = foreign
    ids.tofile(folder / IDS)
    samples = open_prepared(folder).samples
    assert samples[0].ids.tolist() == [5, 6, 7]
    with pytest.raises(UserError, match="is damaged, ids.bin has ids that it cannot have; prepare it again"):
        samples[1]


# ------------------------------------------------------------------------------------------------ splitting


def split_as_one_sample_each(count: int, share: float, seed: int) -> list[int]:
    """The conversations held out of `count`: this must not change, or heads are tuned on what they were trained on."""
    held = 0 if share == 0 else max(1, round(share * count))
    return sorted(np.random.default_rng(seed).permutation(count)[: min(held, count - 1)].tolist())


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_is_a_partition(count: int, share: float, seed: int) -> None:
    rows = [2 * number for number in range(count)]  # others were dropped
    training, held = split_validation(samples_of(rows), share, seed)
    assert [row // 2 for row in held.rows] == split_as_one_sample_each(count, share, seed)
    assert sorted([*training.rows, *held.rows]) == rows
    assert sorted(training.rows) == list(training.rows) and len(training) > 0
    assert (len(held) > 0) == (share > 0 and count > 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=12), st.integers(0, 5))
def test_all_samples_of_a_conversation_are_on_one_side(repeats: list[int], seed: int) -> None:
    rows = [row for row, count in enumerate(repeats) for _ in range(count)]
    training, held = split_validation(samples_of(rows), 0.3, seed)
    assert not set(training.rows) & set(held.rows) and len(training) + len(held) == len(rows)
    assert sorted(set(held.rows)) == split_as_one_sample_each(len(repeats), 0.3, seed)


def test_a_share_must_leave_something() -> None:
    with pytest.raises(UserError, match=r"option data.validation_share: must be at least 0 and below 1, got 1"):
        split_validation(samples_of([0, 1]), 1.0, 0)


def test_the_digest_is_of_ids_and_supervision_in_their_order() -> None:
    prepared = samples_of([0, 1, 1], [3, 2, 1])
    plain = [Sample(sample.ids.clone(), sample.supervised.clone(), 7) for sample in prepared]
    assert digest(prepared) == digest(plain) == "1faf9d732702e0aa"
    assert digest(plain[::-1]) != digest(plain)
