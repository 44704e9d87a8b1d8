"""What is said of other libraries' exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest

import spechead
from spechead.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "one"),
        (ValueError("\n  one \ntwo"), "one"),
        (ValueError(""), "ValueError"),
        (ValueError(" \n "), "ValueError"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("name"), "'name'"),
        (ModuleNotFoundError("no peft", name="peft"), "no peft: pip install 'spechead[train]'"),
        (ModuleNotFoundError("no other", name="other"), "no other"),
    ],
)
def test_one_line_of_any_exception(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_nobody_else_takes_the_first_line() -> None:
    """Of an empty message there is none."""
    files = Path(spechead.__file__).parent.rglob("*.py")
    assert [path for path in files if "splitlines()[0]" in path.read_text(encoding="utf-8")] == []
