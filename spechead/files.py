"""Write files whole or not at all, read JSON, find the files that ship with the package.

Knows nothing of what the files mean. A write goes to a temporary name in the same folder and is renamed,
so that a killed run or a full disk never leaves half a file under the final name.
"""

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spechead.errors import UserError

PACKAGE = Path(__file__).resolve().parent
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
    """Say in a few words what the operating system refused."""
    return REASONS.get(error.errno or 0, error.strerror or str(error))


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents; a UserError names the folder that could not be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {reason(error)}") from error


def refuse_unwritable(folder: Path) -> None:
    """Raise the UserError of `make_folder` where that would fail, and make nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "permission denied" if place.is_dir() else f"{place} is a file"
        raise UserError(f"cannot make the folder {folder}: {why}")


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Inside, no other process on this machine that asks holds `folder`. Raises UserError where one does.

    The hold ends with the process, however that ends. `what`: the option that the folder came from.
    """
    with (folder / ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{what} {folder}: another process writes there; wait, or choose another") from error
        except OSError:
            pass  # a file system that knows no locks
        yield


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` whole: temporary name in the same folder, then rename. Makes the folder."""
    path = Path(path)
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Return when the disk holds what was written to a file, or to all files in a folder; raises OSError."""
    for file in [path] if path.is_file() else [inside for inside in path.rglob("*") if inside.is_file()]:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are refused, since JSON has no word for them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON value; a UserError names the file when it is missing, unreadable or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error


def shipped(name: str) -> Path:
    """Find a file that comes with spechead, such as "data/sample.jsonl" or "recipes/eagle3-smollm2.yaml".

    An installed wheel keeps them under spechead/share; a checkout has them beside the package.
    """
    for root in (PACKAGE / "share", PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise UserError(f"spechead ships no file named {name}")
