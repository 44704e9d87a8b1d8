"""A prepared data set: tokenised samples in a folder, which training maps into memory and reads as it needs them.

    index.json      what it was made of and how, and what was counted on the way
    ids.bin         int32, the token ids of all samples end to end
    supervised.bin  bool, as long: written by the assistant
    samples.npy     a record of `FIELDS` for each sample, repeated as often as one epoch sees the sample

All processes of a machine share the memory of the files.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from tokenize import TokenError
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from spechead.data.dataset import Sample
from spechead.errors import UserError, first_line
from spechead.files import read_json, reason, replacing, write_json

FORMAT, SCHEMA = "spechead prepared data", 1
INDEX, IDS, SUPERVISED, SAMPLES = "index.json", "ids.bin", "supervised.bin", "samples.npy"
# start, length: in tokens; row: of the conversation in its sources; place and number: where the conversation is, see
# `Prepared.place`; kind and writer: indices into the lists of the same names in index.json.
FIELDS = ("start", "length", "row", "place", "number", "kind", "writer")
RECORD = np.dtype([(name, "<i8") for name in FIELDS])
_LISTS = {"places": list, "kinds": list, "writers": list, "sources": list}
_KEYS = {"key": str, "settings": dict, "template": dict, "counts": dict, "dropped": dict, "notes": dict} | _LISTS


@dataclass(frozen=True)
class Prepared:
    """An opened folder."""

    folder: Path
    index: dict[str, Any]  # of index.json
    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    table: NDArray[np.void]  # `RECORD` of each sample

    @property
    def samples(self) -> PreparedSamples:
        return PreparedSamples(self, self.table)

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.index["counts"]
        return counts

    @property
    def dropped(self) -> dict[str, int]:
        """The number of conversations that cannot be used, by reason."""
        return {why: entry["count"] for why, entry in self.index["dropped"].items()}

    @property
    def written_by(self) -> Counter[str]:
        """How many of the conversations each model wrote; the empty name counts those that name none."""
        return Counter(self.index["written by"])

    def dropped_at(self, why: str) -> list[str]:
        """Where the first conversations are that were dropped for this reason."""
        return [self.place(place, number) for _, place, number in self.index["dropped"][why]["places"]]

    def first_dropped(self) -> tuple[str, str]:
        """Where the first conversation is that was dropped, and why."""
        first = min(self.index["dropped"].values(), key=lambda entry: entry["places"][0])
        _, place, number = first["places"][0]
        return self.place(place, number), first["detail"]

    def place(self, place: int, number: int) -> str:
        """`PATH line N` or `NAME row N`. The folder does not contain the names of the sources, which may move."""
        source, rest = self.index["places"][place]
        return f"{self.index['sources'][source] if source >= 0 else ''}{rest} {number}"


class PreparedSamples(Sequence[Sample]):
    """Samples of a prepared data set, read from its files when they are asked for."""

    def __init__(self, data: Prepared, table: NDArray[np.void]) -> None:
        self.data, self.table = data, table

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> PreparedSamples: ...

    def __getitem__(self, index: int | slice) -> Sample | PreparedSamples:
        if isinstance(index, slice):
            return PreparedSamples(self.data, self.table[index])
        start, length, row = (int(self.table[name][index]) for name in ("start", "length", "row"))
        span = slice(start, start + length)
        ids = torch.from_numpy(self.data.ids[span].astype(np.int64))
        if int(ids.min()) < 0 or int(ids.max()) > self.data.counts["max id"]:  # far from here, it would end a run
            raise damaged(self.data.folder, f"{IDS} has ids that it cannot have")
        return Sample(ids, torch.from_numpy(self.data.supervised[span].copy()), row)

    def take(self, index: NDArray[Any]) -> PreparedSamples:
        """Those of an array of indices, or of a mask."""
        return PreparedSamples(self.data, self.table[index])

    @property
    def rows(self) -> NDArray[np.int64]:
        """The conversation of each sample."""
        return self.table["row"]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.table["length"]

    def place(self, row: int) -> str:
        """Where the conversation of that row is: `PATH line N`."""
        record = self.table[int(np.flatnonzero(self.rows == row)[0])]
        return self.data.place(int(record["place"]), int(record["number"]))

    def kind(self, index: int) -> str:
        """The kind that the conversation of a sample is marked with, or an empty name."""
        return str(self.data.index["kinds"][int(self.table["kind"][index])])

    def kinds(self) -> Counter[str]:
        """How many of these conversations are of each kind."""
        return self._count("kind")

    def written_by(self) -> Counter[str]:
        """How many of these conversations each model wrote."""
        return self._count("writer")

    def _count(self, field: str) -> Counter[str]:
        _, first = np.unique(self.rows, return_index=True)
        numbers, counts = np.unique(self.table[field][first], return_counts=True)
        names = self.data.index[f"{field}s"]
        return Counter({names[number]: int(count) for number, count in zip(numbers, counts, strict=True)})


def split_validation(samples: PreparedSamples, share: float, seed: int) -> tuple[PreparedSamples, PreparedSamples]:
    """(training, validation), each in the given order; all samples of a conversation are on one side.

    Any share above 0 holds out at least one conversation, and at least one is left for training.
    """
    if not 0 <= share < 1:
        raise UserError(f"option data.validation_share: must be at least 0 and below 1, got {share}")
    conversations, numbers = np.unique(samples.rows, return_inverse=True)
    count = 0 if share == 0 else max(1, round(share * len(conversations)))
    count = max(0, min(count, len(conversations) - 1))
    chosen = np.random.default_rng(seed).permutation(len(conversations))[:count]
    held_out = np.isin(numbers, chosen)
    return samples.take(~held_out), samples.take(held_out)


# ------------------------------------------------------------------------------------------------ writing


class Writer:
    """Writes the files of a prepared data set into a folder; memory grows by one record a sample."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.samples = self.tokens = self.supervised = self.longest = 0
        self.max_id = -1
        self._records = array("q")
        self._ids, self._supervised = (folder / IDS).open("wb"), (folder / SUPERVISED).open("wb")

    def add(self, ids: NDArray[np.int32], supervised: NDArray[np.bool_], repeats: int, *record: int) -> None:
        """Add a sample; `record`: its `FIELDS` from `row` on."""
        self._ids.write(ids.tobytes())
        self._supervised.write(supervised.tobytes())
        for _ in range(repeats):
            self._records.extend((self.tokens, len(ids), *record))
        self.samples += repeats
        self.tokens += len(ids)
        self.supervised += int(supervised.sum())
        self.longest = max(self.longest, len(ids))
        self.max_id = max(self.max_id, int(ids.max()))

    def finish(self, index: dict[str, Any]) -> None:
        """Write the table and the index; with the index the folder is complete."""
        self.close()
        np.save(self.folder / SAMPLES, np.frombuffer(self._records, dtype=RECORD))
        sizes = {"samples": self.samples, "tokens": self.tokens, "supervised tokens": self.supervised}
        sizes |= {"longest": self.longest, "max id": self.max_id}
        counts = index["counts"] | sizes
        write_json(self.folder / INDEX, {"format": FORMAT, "schema": SCHEMA} | index | {"counts": counts})

    def close(self) -> None:
        self._ids.close()
        self._supervised.close()


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """A writer of `folder`, which appears, or replaces an earlier one, when the body has finished it."""
    with replacing(folder) as scratch:
        writer = Writer(scratch)
        try:
            yield writer
        finally:
            writer.close()


# ------------------------------------------------------------------------------------------------ reading


def is_prepared(name: str) -> bool:
    """Whether a source is the folder of a prepared data set, or of what is left of one."""
    folder = Path(name)
    return isfile(folder / INDEX) and any(isfile(folder / part) for part in (IDS, SUPERVISED, SAMPLES))


def open_prepared(folder: Path, sources: Sequence[str] = ()) -> Prepared:
    """Open a folder. `sources`: what the sources are called here; by default as they were when it was written.

    Raises UserError where it is no prepared data set, one of another version, or damaged.
    """
    index = read_index(folder)
    if sources:
        index["sources"] = list(sources)
    try:
        counts = index["counts"]
        tokens, samples, _ = (int(counts[name]) for name in ("tokens", "samples", "max id"))
        table = np.load(folder / SAMPLES, mmap_mode="r")
        ids = np.memmap(folder / IDS, np.int32, "r")
        supervised = np.memmap(folder / SUPERVISED, np.bool_, "r")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read, {reason(error)}; prepare it again") from error
    except (EOFError, KeyError, SyntaxError, TokenError, TypeError, ValueError) as error:  # of numpy's headers, too
        raise damaged(folder, first_line(error)) from error
    if table.dtype != RECORD or table.shape != (samples,) or not samples:
        raise damaged(folder, f"{SAMPLES} does not have {samples} records")
    if len(ids) != tokens or len(supervised) != tokens:
        raise damaged(folder, f"{IDS} and {SUPERVISED} do not have {tokens} entries")
    ends = table["start"] + table["length"]
    if table["start"].min() < 0 or table["length"].min() < 1 or ends.max() > tokens:
        raise damaged(folder, f"a sample of {SAMPLES} is outside the {tokens} tokens")
    for field, names in (("place", "places"), ("kind", "kinds"), ("writer", "writers")):
        if table[field].min() < 0 or table[field].max() >= len(index[names]):
            raise damaged(folder, f"{SAMPLES} and {INDEX} do not belong together")
    return Prepared(folder, index, ids, supervised, table)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a prepared data set; UserError as in `open_prepared`."""
    if not isfile(folder / INDEX):
        raise UserError(f"{folder}: is no prepared data set, it has no {INDEX}; `spechead data prepare` writes one")
    index = read_json(folder / INDEX)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{folder}: is no prepared data set; `spechead data prepare` writes one")
    if index.get("schema") != SCHEMA:
        raise UserError(f"{folder}: was prepared by another version of spechead; prepare it again")
    for name, kind in (_KEYS | {"written by": dict}).items():
        if not isinstance(index.get(name), kind):
            raise damaged(folder, f"{INDEX} has no {name}")
    return index


def damaged(folder: Path, why: str) -> UserError:
    return UserError(f"{folder}: is damaged, {why}; prepare it again")
