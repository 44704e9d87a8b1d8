"""Timestamps of a device, and the seconds of a generation by phase.

On an accelerator a timestamp is an event in its stream, so that taking one does not wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

PHASES = ("prefill", "draft", "verify", "accept", "keep", "commit", "other")

Timestamp = float | torch.cuda.Event
Method = TypeVar("Method", bound=Callable[..., Any])


def now(device: torch.device) -> Timestamp:
    """The time at which the device has finished all work queued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def is_ready(timestamp: Timestamp) -> bool:
    """Whether the device has reached the timestamp."""
    return isinstance(timestamp, float) or timestamp.query()


def elapsed(begin: Timestamp, end: Timestamp) -> float:
    """Seconds between two timestamps, both of which are ready."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return begin.elapsed_time(end) / 1000


class PhaseTimer:
    """Seconds by phase since its creation; `other` is the time outside every phase."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._begin = now(device)
        self._pending: list[tuple[str, Timestamp, Timestamp]] = []  # spans that the device may not have reached

    def add(self, phase: str, begin: Timestamp) -> None:
        """Count the time from `begin` to now towards `phase`."""
        self._pending.append((phase, begin, now(self.device)))
        while self._pending and is_ready(self._pending[0][2]):
            self._count(*self._pending.pop(0))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; their sum is the time since the creation. Waits for the device."""
        end = now(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._pending:
            self._count(*self._pending.pop(0))
        other = elapsed(self._begin, end) - sum(self._seconds.values())
        return self._seconds | {"other": max(other, 0.0)}

    def _count(self, phase: str, begin: Timestamp, end: Timestamp) -> None:
        self._seconds[phase] += elapsed(begin, end)


def phase(name: str) -> Callable[[Method], Method]:
    """Count the time of a method towards the phase `name` of its object's `timer`."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def timed(self: Any, *args: Any) -> Any:
            begin = now(self.timer.device)
            result = method(self, *args)
            self.timer.add(name, begin)
            return result

        return cast(Method, timed)

    return decorate
