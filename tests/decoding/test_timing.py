"""Timestamps and phases, on a clock that the test controls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spechead.decoding import timing
from spechead.decoding.timing import PHASES, PhaseTimer, elapsed, is_ready, now, phase
from tests.helpers.clock import Clock

CPU = torch.device("cpu")


def test_a_timestamp_of_a_cpu_is_a_time(clock: Clock) -> None:
    begin = now(CPU)
    clock.now += 2.5
    assert is_ready(begin) and elapsed(begin, now(CPU)) == 2.5


def test_time_outside_phases_is_other(clock: Clock) -> None:
    class Work:
        timer = PhaseTimer(CPU)

        @phase("draft")
        def draft(self, seconds: float) -> str:
            clock.now += seconds
            return "done"

        @phase("verify")
        def fail(self) -> None:
            raise ValueError

    work = Work()
    assert work.draft(1.0) == "done"
    clock.now += 10.0
    work.draft(2.0)
    with pytest.raises(ValueError):
        work.fail()
    assert work.timer.seconds() == dict.fromkeys(PHASES, 0.0) | {"draft": 3.0, "other": 10.0}


def test_a_span_waits_for_the_device_and_not_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """As torch's events: ready only after the device got there."""

        ready = False

        def __init__(self, at: float) -> None:
            self.at = at

        def query(self) -> bool:
            return self.ready

        def elapsed_time(self, end: Any) -> float:
            return (end.at - self.at) * 1000

    times = iter(range(10))
    monkeypatch.setattr(timing, "now", lambda device: Event(next(times)))
    timer = PhaseTimer(CPU)
    for name in ("draft", "verify"):
        timer.add(name, timing.now(CPU))
    assert timer._seconds["draft"] == 0.0
    Event.ready = True
    assert timer.seconds() == dict.fromkeys(PHASES, 0.0) | {"draft": 1.0, "verify": 1.0, "other": 3.0}
