"""A running average of the weights (EMA), kept in the optimizer's state with the moments.

Whatever shards, saves and loads the moments does the same to the averages, and each process averages its own shard.
The float32 masters are averaged, not the weights rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

AVERAGE, COUNT = "average", "averaged"  # names in the optimizer's state: the average, and its number of steps


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Average every parameter of the optimizer after each step from now on.

    After n steps the average is Σ_i decay^(n-i) w_i / Σ_i decay^(n-i), i from 1 to n: the bias
    correction of Adam's moments (arXiv 1412.6980, section 3). Steps at a learning rate of 0 do not count: an adapter
    has many of them before its first.
    """

    @torch.no_grad()
    def update(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for master in group["params"]:
                state = optimizer.state[master]
                if not group["lr"] or not state:  # no gradient yet: the optimizer must fill its state first
                    continue
                average = state.setdefault(AVERAGE, torch.zeros_like(master))
                state[COUNT] = count = state.get(COUNT, 0) + 1
                average.lerp_(master, (1 - decay) / (1 - decay**count))

    optimizer.register_step_post_hook(update)


@contextmanager
def averages(optimizer: Optimizer) -> Iterator[None]:
    """Within the context, parameters and their averages are exchanged; where no average is kept, nothing changes."""
    _exchange(optimizer)
    try:
        yield
    finally:
        _exchange(optimizer)


@torch.no_grad()
def _exchange(optimizer: Optimizer) -> None:
    for master, state in optimizer.state.items():
        if AVERAGE in state:
            own = master.clone()
            master.copy_(state[AVERAGE])
            state[AVERAGE].copy_(own)
