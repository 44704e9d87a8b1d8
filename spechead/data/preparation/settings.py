"""What a prepared data set is made of and how, and the key that identifies it.

The key covers all that the samples depend on, the bytes of the data and the code included: with equal keys they are
equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spechead.data.sources import HUB_PREFIX, LINES, Row, files_of, hub_version, read_rows
from spechead.errors import UserError
from spechead.files import PACKAGE, reason
from spechead.target.bundled import cache_folder
from spechead.target.chat_template import ChatTemplate

# The modules that samples may depend on.
CODE = ("data/*.py", "data/preparation/*.py", "target/chat_template.py")
HEAVIEST = 1000  # weight of a source; the table of samples lists each repetition


Stamp = tuple[str, int, int]


class Task(NamedTuple):
    """A row to encode."""

    number: int  # of the row, over all sources
    source: int  # its source's index
    repeats: int  # how often one epoch sees it
    row: Row


@dataclass(frozen=True)
class Preparation:
    """Everything that decides about the samples, and how they are made."""

    sources: list[str]
    chat: ChatTemplate
    max_length: int
    weights: list[float] = field(default_factory=list)  # of the sources; empty: 1 each
    history: str = "each"
    limit: int = 0
    seed: int = 0
    vocab_size: int = 0  # rows of the target's embedding; 0: unknown
    positions: int = 1 << 30  # of the target
    # These do not change the samples.
    strict: bool = False  # refuse the first row that cannot be used
    streaming: bool = False
    workers: int = 0  # processes; 0: one for each core
    prefix: str = ""  # of the options' names in messages

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("no source of conversations is given")
        if not all(self.sources):
            raise UserError("the name of a data source is empty")
        if self.weights and len(self.weights) != len(self.sources):
            raise UserError(
                f"option {self.prefix}weights: {len(self.weights)} values for {len(self.sources)} sources; "
                "give one for each, or none"
            )
        if any(not 0 <= weight <= HEAVIEST for weight in self.weights):
            raise UserError(f"option {self.prefix}weights: each must be from 0 to {HEAVIEST}, got {self.weights}")

    @property
    def length(self) -> int:
        """Longest sample in tokens."""
        return min(self.max_length, self.positions)

    def settings(self) -> dict[str, Any]:
        """What the samples depend on apart from the data and the template; of equal samples it is equal."""
        weights = self.weights or [1.0] * len(self.sources)
        drawn = any(weight % 1 for weight in weights)
        settings = {"weights": weights, "max_length": self.length, "history": self.history, "limit": self.limit}
        return settings | {"seed": self.seed if drawn else 0, "vocab_size": self.vocab_size}

    def tasks(self) -> Iterator[Task]:
        """The rows of all sources, in order, each with how often it is seen; those never seen are left out."""
        number = 0
        for source, name in enumerate(self.sources):
            if self.limit and number >= self.limit:
                return
            weight = self.weights[source] if self.weights else 1.0
            random = np.random.default_rng([self.seed, source])
            left = self.limit - number if self.limit else 0
            for row in read_rows(name, limit=left, streaming=self.streaming):
                repeats = floor(weight) + (random.random() < weight % 1)
                if repeats:
                    yield Task(number, source, repeats, row)
                number += 1


@dataclass(frozen=True)
class Identity:
    """The key of a preparation, and the number of rows of its sources where that is cheap to know, else 0."""

    key: str
    rows: int
    stamps: list[Stamp] = field(compare=False)  # of the files when they were read for the key


def identify(preparation: Preparation) -> Identity:
    """Read all data once for the key; raises UserError for a source that cannot be read."""
    stamps = stamps_of(preparation.sources)
    contents, rows = zip(*(content(name) for name in preparation.sources), strict=True)
    parts = [contents, preparation.settings(), preparation.chat.digest, code_version()]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    total = sum(rows) if all(rows) else 0
    return Identity(key, min(total, preparation.limit) if preparation.limit else total, stamps)


def stamps_of(sources: Sequence[str]) -> list[Stamp]:
    """Of all files of the sources, name, size and time of the last change: equal ones have not changed since."""
    stamps = []
    for path in (path for name in sources if not name.startswith(HUB_PREFIX) for path in files_of(Path(name))):
        try:
            state = path.stat()
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
        stamps.append((str(path), state.st_size, state.st_mtime_ns))
    return stamps


def content(source: str) -> tuple[str, int]:
    """A hash of a source's bytes, or the version of a hub dataset; and its number of lines, 0 if it is not of lines."""
    if source.startswith(HUB_PREFIX):
        return f"{source} {hub_version(source)}", 0
    sha, lines = hashlib.sha256(), 0
    root, counted = Path(source), True
    for path in files_of(root):
        counted = counted and path.suffix.lower() in LINES
        sha.update(f"\0{path.relative_to(root) if path != root else path.suffix}\0".encode("utf-8", "surrogateescape"))
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    sha.update(block)
                    lines += block.count(b"\n")
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
    return sha.hexdigest(), lines if counted else 0


@cache
def code_version() -> str:
    """A hash of the code that samples depend on."""
    sha = hashlib.sha256(f"{version('transformers')} {version('tokenizers')}".encode())
    for path in sorted(path for pattern in CODE for path in PACKAGE.glob(pattern)):
        sha.update(path.read_bytes())
    return sha.hexdigest()


def prepared_cache() -> Path:
    """The folder of prepared data sets: $SPECHEAD_PREPARED, else `prepared` in the folder of converted targets."""
    explicit = os.environ.get("SPECHEAD_PREPARED")
    return Path(explicit) if explicit else cache_folder() / "prepared"
