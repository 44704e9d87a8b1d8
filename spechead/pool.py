"""Apply a function to many items in several processes: results in the order of the items, one item a worker.

The workers end with their parent, however that ends. They are forked where that is safe, which shares the parent's
memory, and spawned elsewhere. Each has a pipe of its own, so that the parent notices at once when the system ends one,
also in the middle of a result: with one pipe for all it could wait for the rest for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from spechead.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
_PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int, start: str = "") -> Generator[R]:
    """`function` of each item, in order. `start`: fork or spawn; by default what suits the system.

    Close the iterator (`contextlib.closing`) where it may be left early: that ends the workers. Raises UserError where
    the system ends a worker; what `function` raises is raised here, in its place.
    """
    context = multiprocessing.get_context(start or ("fork" if sys.platform == "linux" else "spawn"))
    with one_thread_tokenizers():
        idle = deque(_Worker(context, function) for _ in range(workers))
        team, busy = [*idle], deque[_Worker]()
        try:
            for item in items:
                result: list[R] = []
                if not idle:
                    idle.append(busy.popleft())
                    result.append(idle[0].receive())
                idle[0].send(item)
                busy.append(idle.popleft())
                yield from result
            while busy:
                yield busy.popleft().receive()
        finally:
            for worker in team:
                worker.end()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread_tokenizers() -> Iterator[None]:
    """Tokenizers start no threads here and in processes begun here: a fork would not have their locks' owners."""
    before = os.environ.get(_PARALLEL_TOKENIZERS)
    os.environ[_PARALLEL_TOKENIZERS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLEL_TOKENIZERS]
        else:
            os.environ[_PARALLEL_TOKENIZERS] = before


class _Worker:
    """A process that applies the function to one item at a time."""

    def __init__(self, context: Any, function: Callable[[Any], Any]) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self._process.start()
        theirs.close()  # before the next worker is forked: a pipe ends when no process holds its other end

    def send(self, item: Any) -> None:
        try:
            self._pipe.send(item)
        except OSError as error:
            raise _ended() from error

    def receive(self) -> Any:
        """The result of the last item, or what the function raised."""
        try:
            done, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _ended() from error
        if not done:
            raise value
        return value

    def end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _ended() -> UserError:
    return UserError("option workers: the system ended a worker process, perhaps for want of memory; lower it")


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """What a worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            result = True, function(item)
        except Exception as error:
            result = False, error
        pipe.send(result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
