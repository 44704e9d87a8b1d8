"""Work of several processes: in order, bounded, and none is left over."""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from spechead.errors import UserError
from spechead.pool import cores, map_in_order
from tests.helpers.processes import begin, end


def process(_: int) -> int:
    return os.getpid()


def end_at_five(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refuse_five(number: int) -> int:
    if number == 5:
        raise UserError("five")
    return number


def tokenizers_are_parallel(_: int) -> str | None:
    return os.environ.get("TOKENIZERS_PARALLELISM")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_results_come_in_the_order_of_the_items(start: str) -> None:
    assert list(map_in_order(operator.neg, range(50), 2, start)) == [-number for number in range(50)]


def test_few_items_are_in_flight() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while taken < 100:
            taken += 1
            yield taken

    for done, _ in enumerate(map_in_order(operator.neg, items(), 2), start=1):
        assert taken <= done + 2
    assert taken == done == 100


def test_an_iterator_that_is_left_early_ends_its_processes() -> None:
    with closing(map_in_order(process, range(100), 2)) as pids:
        some = [next(pids) for _ in range(8)]
    assert os.getpid() not in some and gone(some)


def test_an_error_is_that_of_its_item_and_ends_the_processes() -> None:
    results = map_in_order(refuse_five, range(100), 2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="^five$"):
        next(results)


def test_a_worker_that_the_system_ends_is_an_error() -> None:
    with pytest.raises(UserError, match="option workers: the system ended a worker process"):
        list(map_in_order(end_at_five, range(100), 2))


def end_in_the_middle(number: int) -> bytes:
    if number == 5:  # while the result, larger than a pipe, is written
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0.05)
    return bytes(1 << 24)


def test_a_worker_that_ends_within_a_result_is_an_error() -> None:
    results = map_in_order(end_in_the_middle, range(100), 2)
    with pytest.raises(UserError, match="option workers: the system ended a worker process"):
        for _ in results:
            time.sleep(0.05)  # so that results wait in their pipes


def test_tokenizers_start_no_threads_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert list(map_in_order(tokenizers_are_parallel, range(2), 1)) == ["false", "false"]
    assert "TOKENIZERS_PARALLELISM" not in os.environ


ENDLESS = """
import itertools, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from spechead.pool import map_in_order
from tests.test_pool import process
for number, pid in enumerate(map_in_order(process, itertools.count(), 2)):
    if number < 50:
        print(pid, flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(sent: signal.Signals) -> None:
    parent = begin(ENDLESS)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(50)]
    err = end(parent, sent)
    assert parent.returncode == -sent and gone(pids)
    assert err.count("Traceback") == (1 if sent == signal.SIGINT else 0), "workers are silent"


def test_cores_are_those_of_this_process() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
