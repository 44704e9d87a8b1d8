"""Marks in time: of the clock on a CPU; on an accelerator events in the queue of its work, so that nothing waits.

Knows nothing of what is timed.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """This moment, or that in which the device has done what it was told so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def reached(at: Mark) -> bool:
    """Whether the device has come to the mark."""
    return isinstance(at, float) or at.query()


def elapsed(begin: Mark, end: Mark) -> float:
    """Both marks must be reached."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return begin.elapsed_time(end) / 1000
