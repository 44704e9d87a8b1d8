from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training import write_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its conversations. Not to be changed."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))
