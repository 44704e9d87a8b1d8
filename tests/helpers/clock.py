"""A clock that passes only where a test says so."""

from __future__ import annotations

from typing import Any

import pytest


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._patch = 0.0, monkeypatch
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def slow(self, owner: Any, name: str, seconds: float) -> None:
        """Each call of that method takes `seconds` more."""
        work = getattr(owner, name)

        def slowly(*args: Any, **more: Any) -> Any:
            self.now += seconds
            return work(*args, **more)

        self._patch.setattr(owner, name, slowly)
