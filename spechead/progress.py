"""Progress of a long job: a bar with rate and remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

PLAIN_INTERVAL_S = 10.0


class Progress:
    """A bar with rate and remaining time on a terminal; elsewhere a line every ten seconds and a last one.

    `total`: 0 if it is unknown. `done`: units finished by an earlier run; they count towards the total and not towards
    the rate.
    `quiet`: show nothing (every process but the first of a distributed job).
    """

    def __init__(self, title: str, total: int, unit: str = "step", *, done: int = 0, quiet: bool = False) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self.note = done, ""
        self._first = done
        self._quiet = quiet
        self._started = self._last_line = time.monotonic()
        self._printed = -1
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        self._started = self._last_line = time.monotonic()
        console = Console(stderr=True)
        if console.is_terminal and not self._quiet:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task(self.title, total=self.total or None, completed=self.done, state="")
            self._bar.start()
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self.note = note or self.note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, state=self.state())
        elif time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._print_line()

    def state(self) -> str:
        """`120/400 step | 2.1 step/s | 2:13 left | loss 3.21`"""
        elapsed = time.monotonic() - self._started
        fresh = self.done - self._first
        parts = [f"{self.done}/{self.total} {self.unit}" if self.total else f"{self.done} {self.unit}"]
        if fresh > 0 and elapsed > 0:
            rate = fresh / elapsed
            parts.append(f"{rate:.1f} {self.unit}/s" if rate >= 1 else f"{1 / rate:.1f} s/{self.unit}")
            if self.done < self.total:
                parts.append(f"{clock((self.total - self.done) / rate)} left")
            else:
                parts.append(f"{clock(elapsed)} in all")
        return " | ".join(parts + [self.note] * bool(self.note))

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        self._printed = self.done
        if not self._quiet:
            print(f"{self.title} {self.state()}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, state=self.state())
            self._bar.stop()
        elif self._printed != self.done:
            self._print_line()


def clock(seconds: float) -> str:
    """`2:13`, or `1:02:13` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
