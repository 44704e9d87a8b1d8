"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import pytest

from spechead import progress as module
from spechead.progress import Progress, clock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    return fake


def test_plain_progress_prints_a_line_every_ten_seconds_and_one_at_the_end(
    ticking: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("train", total=40) as progress:
        for _ in range(40):
            ticking.now += 0.5
            progress.advance(1, note="loss 3.21")
    assert capsys.readouterr().err.splitlines() == [
        "train 20/40 step | 2.0 step/s | 0:10 left | loss 3.21",
        "train 40/40 step | 2.0 step/s | 0:20 in all | loss 3.21",
    ]


def test_progress_rate_leaves_out_what_an_earlier_run_did(ticking: Clock) -> None:
    with Progress("train", total=400, done=380, quiet=True) as progress:
        ticking.now += 50
        progress.advance(10)
        assert progress.state() == "390/400 step | 5.0 s/step | 0:50 left"


def test_of_an_unknown_total_the_count_and_the_rate_are_shown(ticking: Clock) -> None:
    with Progress("prepare", total=0, unit="row", quiet=True) as progress:
        ticking.now += 5
        progress.advance(20)
        assert progress.state() == "20 row | 4.0 row/s | 0:05 in all"


def test_quiet_progress_shows_nothing(ticking: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", total=2, quiet=True) as progress:
        ticking.now += 60
        progress.advance()
    assert capsys.readouterr() == ("", "")


def test_clock() -> None:
    assert [clock(0.4), clock(59.6), clock(133), clock(3733)] == ["0:00", "1:00", "2:13", "1:02:13"]
