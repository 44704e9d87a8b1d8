"""Write files and folders whole or not at all, read JSON and JSONL, lock a folder, check that a run is resumed with
the same settings, find shipped files, and make a text fit for UTF-8.

A write goes to a temporary name in the same folder and is renamed, so that a killed run or a full disk never leaves
half a file under the final name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spechead.errors import UserError

PACKAGE = Path(__file__).resolve().parent
SURROGATE = re.compile("[\ud800-\udfff]")
"""A half of a UTF-16 pair, which no text holds: JSON escapes and undecodable bytes of a command line leave them."""
REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a file of that name is in the way",
    errno.EISDIR: "it is a folder",
}


def reason(error: OSError) -> str:
    """Describe in a few words why the operating system refused."""
    return REASONS.get(error.errno or 0, error.strerror or str(error))


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; a UserError names the folder that could not be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {reason(error)}") from error


def refuse_unwritable(folder: Path) -> None:
    """Raise the UserError of `make_folder` where that would fail; create nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "permission denied" if place.is_dir() else f"{place} is a file"
        raise UserError(f"cannot make the folder {folder}: {why}")


@contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """Make `folder` and lock it against other processes of this machine; UserError where one of them has locked it.

    The lock ends with the process, however that ends. `option`: the option that named the folder.
    """
    make_folder(folder)  # without it, the lock could not be made
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"option {option}: another process writes to {folder}; wait for it, or choose another folder"
        ) from error
    except (OSError, NotImplementedError):  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


@contextmanager
def exclusively(lock: Path, note: str) -> Iterator[None]:
    """Wait until no other process of this machine is in a block with the same lock file. `note`, unless empty, is
    printed where that takes time.

    The lock ends with the process, however that ends.
    """
    make_folder(lock.parent)
    file = FileLock(lock)
    with suppress(OSError, NotImplementedError):  # a file system without locks
        lock.touch()  # where that fails, some systems would let the lock be awaited for ever
        try:
            file.acquire(timeout=1)
        except Timeout:
            if note:
                print(f"{note}: waiting for it", file=sys.stderr, flush=True)
            file.acquire()
    try:
        yield
    finally:
        file.release()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the body writes there, a file or a folder, becomes `path` at its end.

    If the body raises, nothing is left of it and an earlier `path` is unchanged. An OSError becomes a UserError. Files
    may be read as the umask says, whatever made them.
    """
    path = Path(os.path.abspath(path))
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"cannot write {path}: it is a device or a pipe")
    make_folder(path.parent)
    scratch, old = (path.with_name(f".{path.name}.{secrets.token_hex(4)}.{end}") for end in ("tmp", "old"))
    try:
        yield scratch
        flush(scratch)
        share(scratch)
        if scratch.is_dir() and path.is_dir():
            path.rename(old)  # a folder cannot be renamed over another
        os.replace(scratch, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    finally:
        if os.path.exists(old) and not os.path.exists(path):  # interrupted between the two renames
            old.rename(path)
        remove(scratch)
        remove(old)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and the system allows it."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def flush(path: Path) -> None:
    """Write a file, or all files in a folder, through to the disk; raises OSError."""
    for file in files_in(path):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def share(path: Path) -> None:
    """Give a file, or all files in a folder, the mode of a new file: safetensors makes them private to their owner,
    and servers run as other users."""
    mask = os.umask(0)
    os.umask(mask)
    for file in files_in(path):
        with suppress(OSError):  # a file system without modes
            file.chmod(0o666 & ~mask)


def files_in(path: Path) -> list[Path]:
    """The file itself, or all files in a folder."""
    return [path] if path.is_file() else [inside for inside in path.rglob("*") if inside.is_file()]


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all. Makes the folder."""
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are refused, since JSON cannot express them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON value; a UserError names the file if it is missing, unreadable or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error


def read_jsonl(path: Path, what: str, *, growing: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield `PATH line N` and the JSON value of each line that is not blank.

    `growing`: skip a last line without its newline, half written by a process that was killed or still runs.

    Raises UserError for a file that cannot be read, calling it `what`, and for a line that is not JSON.
    """
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not (growing and not line.endswith("\n")):
                    yield f"{path} line {number}", json.loads(line)
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the {what} {path} are not UTF-8 text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} line {number}: not valid JSON: {error}") from error


def clean(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD: without that, tokenizers and files refuse it."""
    return SURROGATE.sub("\ufffd", text)


# ------------------------------------------------------------------------------------------------ resuming


def difference(
    settings: dict[str, Any], earlier: dict[str, Any], free: Sequence[str] = ()
) -> tuple[str, Any, Any] | None:
    """The first dotted name whose value differs between two trees of settings, with both values (None: missing).

    `free`: names that may differ; one that ends in a dot stands for all below it.
    """
    now, before = flat(settings), flat(earlier)
    for name in sorted(now.keys() | before.keys()):
        ignored = any(name == one or (one.endswith(".") and name.startswith(one)) for one in free)
        if not ignored and now.get(name) != before.get(name):
            return name, now.get(name), before.get(name)
    return None


def claim(path: Path, settings: dict[str, Any], *, free: Sequence[str] = (), remedy: str) -> None:
    """Write `settings` to the JSON file `path`, or raise UserError if its run was begun with other settings.

    `free`: see `difference`. `remedy`: the end of the message.
    """
    settings = json.loads(json.dumps(settings))
    if path.is_file():
        earlier = read_json(path)
        changed = difference(settings, earlier if isinstance(earlier, dict) else {}, free)
        if changed is not None:
            name, now, before = changed
            raise UserError(f"{path.parent} was begun with {name} = {before!r}, now {now!r}: {remedy}")
    write_json(path, settings)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings as dotted names; tuples become lists, as in JSON."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = list(value) if isinstance(value, tuple) else value
    return leaves


# ------------------------------------------------------------------------------------------------ shipped files


def shipped(name: str) -> Path:
    """Find a file that comes with spechead, such as "data/sample.jsonl" or "recipes/eagle3-smollm2.yaml".

    In an installed wheel they are under spechead/share; in a checkout, beside the package.
    """
    for root in (PACKAGE / "share", PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise UserError(f"spechead ships no file named {name}")
