"""From rows to the arrays of their samples: what a worker process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from spechead.data.encode import Encoded, encode
from spechead.data.messages import Unusable
from spechead.data.preparation.settings import Preparation, Task
from spechead.data.sources import parse
from spechead.pool import cores, map_in_order
from spechead.target.chat_template import ChatTemplate

CHUNK_ROWS, CHUNK_BYTES = 64, 1 << 18  # what a worker is given at once
SMALL_ROWS, SMALL_BYTES = 2000, 1 << 22  # up to here, workers cost more time than they save
OBJECT_BYTES = 1024  # assumed of a row that is not text
MOST_IDS = 1 << 31  # int32


@dataclass
class Outcome:
    """What became of a row: samples, or the reason why there are none."""

    number: int  # as in `Task`
    source: int
    repeats: int
    where: str
    samples: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = field(default_factory=list)
    truncated: int = 0
    reason: str = ""
    detail: str = ""
    parsed: bool = False  # the row is a conversation, and the following are known
    kind: str = ""
    writer: str = ""
    replaced: int = 0  # lone surrogates
    notes: Counter[str] = field(default_factory=Counter)


@dataclass
class RowEncoder:
    """Encodes rows; passes to worker processes."""

    chat: ChatTemplate
    length: int  # longest sample
    history: str
    vocab_size: int

    def __call__(self, tasks: Sequence[Task]) -> list[Outcome]:
        return [self.encode(task) for task in tasks]

    def encode(self, task: Task) -> Outcome:
        outcome = Outcome(task.number, task.source, task.repeats, task.row.where)
        try:
            conversation = parse(task.row)
            outcome.parsed, outcome.replaced = True, conversation.replaced
            outcome.kind = str(conversation.meta.get("kind") or "")
            outcome.writer = str(conversation.meta.get("target") or "")
            self._add(outcome, encode(self.chat, conversation, history=self.history, counts=outcome.notes))
        except Unusable as error:
            outcome.samples, outcome.reason, outcome.detail = [], error.reason, error.detail
            outcome.notes.clear()
        return outcome

    def _add(self, outcome: Outcome, samples: Sequence[Encoded]) -> None:
        """Add the samples that can be used; Unusable where there are none, for what is wrong with the first."""
        refused: list[Unusable] = []
        for encoded in samples:
            try:
                self._refuse(encoded)
            except Unusable as error:
                refused.append(error)
                continue
            ids = np.array(encoded.ids[: self.length], np.int32)
            outcome.samples.append((ids, np.array(encoded.supervised[: self.length])))
            outcome.truncated += len(encoded.ids) > self.length
        if not outcome.samples:
            raise refused[0] if refused else Unusable("too short")
        for one in refused:
            outcome.notes[f"samples left out: {one.reason}"] += 1

    def _refuse(self, encoded: Encoded) -> None:
        """Raise Unusable for a sample in which nothing can be learned, and for ids that the target lacks."""
        if not any(encoded.supervised[1 : self.length]):  # no token comes before the first
            raise Unusable("too long" if any(encoded.supervised[self.length :]) else "too short")
        ids = encoded.ids[: self.length]
        if max(ids) >= (self.vocab_size or MOST_IDS) or min(ids) < 0:
            foreign = next(token for token in ids if not 0 <= token < (self.vocab_size or MOST_IDS))
            raise Unusable("ids beyond the embedding's rows", f"id {foreign} of {self.vocab_size or MOST_IDS} rows")


def outcomes(preparation: Preparation) -> Generator[Outcome]:
    """The outcome of every row, in order, by as many processes as are worth starting. Close it where left early."""
    encoder = RowEncoder(preparation.chat, preparation.length, preparation.history, preparation.vocab_size)
    rest = chunks(preparation.tasks())
    first: list[list[Task]] = []
    rows = size = 0
    for chunk in rest:
        first.append(chunk)
        rows, size = rows + len(chunk), size + sum(map(size_of, chunk))
        if rows > SMALL_ROWS or size > SMALL_BYTES:
            break
    workers = preparation.workers or cores()
    if workers == 1 or (rows <= SMALL_ROWS and size <= SMALL_BYTES):
        for chunk in chain(first, rest):
            yield from encoder(chunk)
        return
    with closing(map_in_order(encoder, chain(first, rest), workers)) as results:
        for result in results:
            yield from result


def chunks(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    chunk: list[Task] = []
    size = 0
    for task in tasks:
        chunk.append(task)
        size += size_of(task)
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def size_of(task: Task) -> int:
    """Bytes of a row."""
    return len(task.row.value) if isinstance(task.row.value, bytes) else OBJECT_BYTES
