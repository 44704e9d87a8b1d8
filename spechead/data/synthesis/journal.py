"""Finished conversations of an interrupted command: OUT.partial/ with its settings and a journal for each process.

A journal only grows, by one line for each finished conversation. A line that a killed process left half written is
not counted, and its conversation is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from spechead.errors import UserError
from spechead.files import claim, clean, exclusively, locked, read_json, remove

Entry = dict[str, Any]  # {"number": row in the source, ...}
Place = tuple[Path, int]  # a journal, and the offset of a line in it
SETTINGS, LINES = "settings.json", "conversations.journal"


def check_out(out: Path) -> None:
    """Raise UserError where `out` is there and is no file: a rename would put one in the place of a device."""
    if out.exists() and not out.is_file():
        kind = "a folder" if out.is_dir() else "a device or a pipe"
        raise UserError(f"option out: {clean(str(out))} is {kind}, name a file")


class Journal:
    """The finished conversations of all processes, and the journal that this one appends to."""

    def __init__(self, out: Path, rank: int = 0) -> None:
        self.out = out
        self.meta = out.with_name(out.name + ".meta.json")
        self.partial = out.with_name(out.name + ".partial")
        self._own = self.partial / f"process-{rank}"
        self._lock_file = out.with_name(f".{out.name}.lock")  # not in OUT.partial/, which goes while others wait

    def begin(self, settings: dict[str, Any]) -> dict[int, Place] | None:
        """Claim OUT.partial/ for these settings; returns what is finished, None where OUT was written with them.

        Raises UserError where it was begun with others.
        """
        settings = json.loads(json.dumps(settings))
        with self.lock():
            if self._complete(settings):
                remove(self.partial)
                return None
            if self.out.is_file() and self.gone:
                raise UserError(
                    f"option out: {self.out} is there, and not of these settings; delete it, or name another file"
                )
            claim(self.partial / SETTINGS, settings, remedy="keep the old value, or delete that folder")
            return self.finished()

    def _complete(self, settings: dict[str, Any]) -> bool:
        if not (self.out.is_file() and self.meta.is_file()):
            return False
        meta = read_json(self.meta)
        return isinstance(meta, dict) and all(meta.get(name) == value for name, value in settings.items())

    def written(self) -> dict[str, Any]:
        """The record of OUT."""
        return dict(read_json(self.meta))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time; the others wait."""
        with exclusively(self._lock_file, ""):
            try:
                yield
            finally:
                if not self.partial.exists():
                    remove(self._lock_file)  # whoever still waits for it finds the work done

    @property
    def gone(self) -> bool:
        """Another process has written OUT and removed OUT.partial/."""
        return not (self.partial / SETTINGS).exists()

    def finished(self) -> dict[int, Place]:
        """Where the entry of each finished conversation is. To be called inside the lock."""
        places: dict[int, Place] = {}
        for path in sorted(self.partial.glob(f"process-*/{LINES}")):
            with path.open("rb") as lines:
                offset = 0
                for line in lines:
                    number = number_of(line)
                    if number is not None:
                        places.setdefault(number, (path, offset))
                    offset += len(line)
        return places

    @contextmanager
    def appending(self) -> Iterator[Appender]:
        """Append to the journal of this process, which no other may."""
        with locked(self._own, "out"):
            appender = Appender(self._own / LINES)
            try:
                yield appender
            finally:
                appender.close()


class Appender:
    """Appends entries; each is in the file when `add` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        with path.open("rb") as lines:
            whole = sum(len(line) for line in lines if line.endswith(b"\n"))
        self._file.truncate(whole)  # drops what a killed process left half written

    def add(self, entry: Entry) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Entries:
    """Reads entries at their places."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, place: Place) -> Entry:
        path, offset = place
        if path not in self._files:
            self._files[path] = path.open("rb")
        self._files[path].seek(offset)
        entry: Entry = json.loads(self._files[path].readline())
        return entry


def number_of(line: bytes) -> int | None:
    """The number of the conversation that a line of a journal describes; None: the line is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        number = json.loads(line)["number"]
    except (ValueError, LookupError, TypeError):
        return None
    return number if isinstance(number, int) else None
