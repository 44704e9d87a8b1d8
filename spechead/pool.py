"""Apply a function to many items in several processes: results in the order of the items, few items in flight.

The workers end with their parent, however that ends. They are forked where that is safe, which shares the parent's
memory, and started anew elsewhere.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from spechead.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
IN_FLIGHT = 3  # items a worker, so that none waits for the parent
_PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"
_function: Callable[[Any], Any]


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int, start: str = "") -> Generator[R]:
    """`function` of each item, in order. `start`: fork or spawn; by default what suits the system.

    Close the iterator (`contextlib.closing`) where it may be left early: that ends the workers. Raises UserError where
    the system ends a worker; what `function` raises is raised here, in its place.
    """
    context = multiprocessing.get_context(start or ("fork" if sys.platform == "linux" else "spawn"))
    pending: deque[Future[R]] = deque()
    with one_thread_tokenizers():
        executor = ProcessPoolExecutor(workers, context, _begin, (function,))
        try:
            for item in items:
                pending.append(executor.submit(_apply, item))
                if len(pending) >= workers * IN_FLIGHT:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "option workers: the system ended a worker process, perhaps for want of memory; lower it"
            ) from error
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


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


def _begin(function: Callable[[Any], Any]) -> None:
    """The first call in a worker."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _apply(item: Any) -> Any:
    return _function(item)
