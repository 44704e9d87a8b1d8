"""Rows of files, folders and hub datasets, and each row as a conversation.

Reading costs little and parsing much: a JSONL line stays bytes until `parse`, which another process may do. Only a
JSON array is held in memory whole. A fault in one row costs that row; a file that cannot be read is a UserError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from spechead.data.conversation import COLUMNS, Conversation, conversation_of
from spechead.data.messages import Unusable
from spechead.errors import UserError, first_line
from spechead.files import reason

HUB_PREFIX = "hf:"
LINES = (".jsonl", ".ndjson")
SUFFIXES = (*LINES, ".json", ".parquet")
OTHER_FORMATS = (".arrow", ".bin", ".csv", ".md", ".pt", ".safetensors", ".tar", ".tsv", ".xlsx", ".zip")
BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 64 * 2**20
BATCH = 256
"""Rows of a Parquet file in memory at once."""


@dataclass(frozen=True)
class Row:
    where: str
    """PATH line N, PATH row N or hf:NAME row N, counted from 1."""
    value: Any
    """The bytes of one JSONL line, an object, or the Unusable of a row that could not be read."""


def read_rows(source: str, *, limit: int = 0, streaming: bool = False) -> Iterator[Row]:
    """Rows of a file, of a folder's files or of a hub dataset `hf:NAME[:SPLIT]`; at most `limit`, 0 for all.

    `streaming`: fetch a hub dataset while it is read, rather than all of it first. UserError, when the iteration
    comes to it: a source that cannot be read or has no row.
    """
    if not source:  # as a path it would be the current folder
        raise UserError("the name of a data source is empty")
    if source.startswith(HUB_PREFIX):
        rows = hub_rows(source, streaming)
    else:
        rows = (row for path in files_of(Path(source)) for row in file_rows(path))
    empty = True
    for row in islice(rows, limit or None):
        empty = False
        yield row
    if empty:
        raise UserError(f"{source}: contains no conversation")


def parse(row: Row, *, answered: bool = True) -> Conversation:
    """The conversation in a row; Unusable for every fault of it. `answered`: see `conversation_of`."""
    if isinstance(row.value, Unusable):
        raise row.value
    value = loads(row.value) if isinstance(row.value, bytes) else row.value
    return conversation_of(value, answered=answered)


def loads(line: bytes) -> Any:
    """The JSON value of a line; Unusable with the kind of fault."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Unusable("not UTF-8", str(error)) from error
    except json.JSONDecodeError as error:
        raise Unusable("not valid JSON", str(error)) from error
    except RecursionError as error:
        raise Unusable("nested too deeply") from error
    except ValueError as error:
        raise Unusable("a number of too many digits", str(error)) from error


# ------------------------------------------------------------------------------------------------ files


def files_of(path: Path) -> list[Path]:
    """The file itself, or the data files in a folder, sorted; hidden ones and records `*.meta.json` are skipped.

    UserError for a name that no file can have, a folder without data files, and one that cannot be listed whole.
    """
    if "\0" in str(path):
        raise UserError(f"cannot read {str(path)!r}: no file has such a name")
    try:
        if not path.is_dir():
            return [path]
        files = sorted(file for file in inside(path, set()) if is_data(file))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {reason(error)}") from error
    if not files:
        raise UserError(f"{path}: the folder has no data file: {', '.join(SUFFIXES)}, also .gz")
    return files


def inside(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """What is in a folder and those below, but for hidden names; linked folders too, each once."""
    if (place := folder.resolve()) in seen:
        return
    seen.add(place)
    for path in folder.iterdir():
        if not path.name.startswith("."):
            yield from inside(path, seen) if path.is_dir() else [path]


def is_data(file: Path) -> bool:
    """Whether a file in a folder is one of data; a link to nothing is one, which cannot be read."""
    return (
        suffix_of(file) in SUFFIXES
        and not file.name.endswith(".meta.json")
        and (file.is_file() or (file.is_symlink() and not file.exists()))
    )


def suffix_of(path: Path) -> str:
    """The suffix that names the format, in lower case, without .gz."""
    name = path.name.lower()
    packed = name.endswith(".gz") and not name.endswith(".parquet.gz")
    return Path(name.removesuffix(".gz") if packed else name).suffix


def file_rows(path: Path) -> Iterator[Row]:
    """Rows of one file by its suffix; where that says nothing, a first character `[` marks an array."""
    if suffix_of(path) in OTHER_FORMATS:
        raise UserError(f"{path}: is of a format that is not read; give {', '.join(SUFFIXES)}, also .gz")
    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            yield from parquet_rows(path)
            return
        packed = path.name.lower().endswith(".gz")
        with cast(IO[bytes], gzip.open(path)) if packed else path.open("rb") as file:
            start = file.peek(4096)  # type: ignore[attr-defined]  # both kinds have it
            if start.startswith(BOM):
                file.read(len(BOM))
            array = suffix not in LINES and start.removeprefix(BOM).lstrip()[:1] == b"["
            yield from array_rows(path, file.read()) if array else line_rows(path, file)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error


def line_rows(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """The lines that are not blank."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{path} line {number}"
        if len(line) > LONGEST_LINE:
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield Row(where, Unusable(f"longer than {LONGEST_LINE // 2**20} MB"))
        elif line.strip():
            yield Row(where, line)


def array_rows(path: Path, content: bytes) -> Iterator[Row]:
    """The values of a JSON array."""
    try:
        values = loads(content)
    except Unusable as error:
        raise UserError(f"{path}: {error}") from error
    for number, value in enumerate(values, start=1):
        yield Row(f"{path} row {number}", value)


# ------------------------------------------------------------------------------------------------ columns


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file, with the columns that matter."""
    try:
        from pyarrow.parquet import ParquetFile

        number = 0
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            for batch in file.iter_batches(BATCH, columns=[name for name in names if name in COLUMNS] or None):
                for value in parquet_values(batch):
                    number += 1
                    yield Row(f"{path} row {number}", value)
    except OSError:
        raise
    except Exception as error:  # pyarrow's own classes, ValueError and others, without a common base
        raise UserError(f"cannot read {path}: {first_line(error)}") from error


def parquet_values(batch: Any) -> list[Any]:
    """The rows of a batch as objects; an Unusable in place of a row with text that is not UTF-8 or a foreign date."""
    try:
        return [without_nulls(value) for value in batch.to_pylist()]
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            return [Unusable("a value that cannot be read", first_line(error))]
    return [value for index in range(len(batch)) for value in parquet_values(batch.slice(index, 1))]


def hub_rows(source: str, streaming: bool) -> Iterator[Row]:
    """`hf:NAME[:SPLIT]` through `datasets`; the split is `train` unless named."""
    name, split = hub_name(source)
    try:
        from datasets import load_dataset

        for number, row in enumerate(load_dataset(name, split=split, streaming=streaming), start=1):
            yield Row(f"{source} row {number}", without_nulls(row))
    except Exception as error:  # its many error classes have no common base
        raise UserError(f"dataset {source} cannot be loaded: {first_line(error)}") from error


def hub_name(source: str) -> tuple[str, str]:
    """The dataset and the split of `hf:NAME[:SPLIT]`, which is `train` unless named."""
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UserError(f"data source {source}: names no dataset, give it as {HUB_PREFIX}NAME[:SPLIT]")
    return name, split or "train"


def hub_version(source: str) -> str:
    """What identifies the contents of a hub dataset `hf:NAME[:SPLIT]`, without reading them."""
    name, _ = hub_name(source)
    try:
        from datasets import load_dataset_builder

        builder = load_dataset_builder(name)
    except Exception as error:  # as above
        raise UserError(f"dataset {source} cannot be loaded: {first_line(error)}") from error
    return f"{builder.config_id} {builder.hash}"


def without_nulls(value: Any) -> Any:
    """A copy without keys that are null: tables give each object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
