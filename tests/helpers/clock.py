"""A clock that a test controls."""

from __future__ import annotations

from typing import Any

import pytest


class Clock:
    """`time.perf_counter` advances only in methods made slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._patch = 0.0, monkeypatch
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def slow(self, owner: Any, name: str, seconds: float) -> None:
        """Each call of the method or function takes `seconds` more."""
        work = getattr(owner, name)

        def slowly(*args: Any, **more: Any) -> Any:
            self.now += seconds
            return work(*args, **more)

        self._patch.setattr(owner, name, slowly)
