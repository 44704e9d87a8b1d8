"""Acceptance length, survival, speed-up and their intervals: each number that spechead reports is defined here once.

Functions of counts and seconds; docs/metrics.md explains the same definitions in words.

Legend: K depths, T rows (tokens of a text), C columns, P prompts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

RESAMPLES = 2000


# ------------------------------------------------------------------------------------------------ acceptance


def acceptance_length(tokens: float, passes: float) -> float | None:
    """tau: tokens committed by passes / passes, bonus tokens included. Pool both sums over a suite first."""
    return tokens / passes if passes else None


def survival(drafted: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """survival@k for k = 1, 2, ...: passes that accepted at least k drafts / passes that offered depth k.

    tau = 1 + the sum of this list, where every pass offers every depth and no stop or cap cuts a pass.
    """
    depths = range(1, max(drafted, default=0) + 1)
    return [sum(a >= k for a in accepted) / sum(d >= k for d in drafted) for k in depths]


def conditional_acceptance(drafted: Sequence[int], accepted: Sequence[int]) -> list[float | None]:
    """cond_accept@k for k = 1, 2, ...: of the passes that offered depth k and accepted depths 1 to k-1, the
    share that accepted depth k too; None where no pass reached it. Their running product is survival, where
    every pass offers every depth."""
    passes = list(zip(drafted, accepted, strict=True))
    rates: list[float | None] = []
    for k in range(1, max(drafted, default=0) + 1):
        reached = sum(d >= k and a >= k - 1 for d, a in passes)
        rates.append(sum(a >= k for _, a in passes) / reached if reached else None)
    return rates


def walk(hits: Tensor, valid: Tensor) -> tuple[int, int]:
    """Passes and tokens of a chain, from teacher-forced flags walked as decoding walks them.

    hits:  bool [K, T], hits[k, t]: the draft of depth k+1 of a pass that starts at row t equals the true token
    valid: bool [T], the rows of tokens that decoding would write, in one or more runs

        row      0  1  2  3  4  5
        depth 1  x  .  x  x  .  x      pass 1 at row 0 accepts 2, commits 3 tokens
        depth 2  x  .  .  x  .  .      pass 2 at row 3 accepts 2, commits 3 tokens: 2 passes, 6 tokens

    The plain mean over rows would overstate decoding: a pass starts where the last one failed, so that hard
    rows start more passes than easy ones. The end of a run cuts its last pass.
    """
    accepted = hits.long().cumprod(0).sum(0).tolist()  # [T]
    rows = valid.tolist()
    passes = tokens = t = 0
    while t < len(rows):
        if not rows[t]:
            t += 1
            continue
        passes += 1
        end = t + accepted[t] + 1
        while t < end and t < len(rows) and rows[t]:
            t, tokens = t + 1, tokens + 1
    return passes, tokens


# ------------------------------------------------------------------------------------------------ speed


def speedup(plain_seconds: float, plain_tokens: float, seconds: float, tokens: float) -> float:
    """Plain seconds per token / speculative seconds per token."""
    return (plain_seconds / plain_tokens) / (seconds / tokens)


def interval(
    columns: Sequence[Sequence[float]], statistic: Callable[..., Any], *, seed: int = 0
) -> tuple[float, float] | None:
    """Bootstrap 95 % interval of a pooled statistic, resampling whole prompts: their passes go together.

    Each column has one number per prompt; `statistic` receives the columns' sums over a resampled set of prompts,
    as arrays with one entry per resample, and pools them. None if no resample gives a finite number.
    """
    values = np.asarray(columns, dtype=np.float64)  # [C, P]
    prompts = values.shape[1]
    if prompts == 0:
        return None
    drawn = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    with np.errstate(divide="ignore", invalid="ignore"):
        results = np.asarray(statistic(*values[:, drawn].sum(-1)))  # [RESAMPLES]
    results = results[np.isfinite(results)]
    if results.size == 0:
        return None
    low, high = np.quantile(results, [0.025, 0.975])
    return float(low), float(high)


# ------------------------------------------------------------------------------------------------ theory


def pass_cost(v: float, depth: float, c: float, rest: float = 0.0) -> float:
    """v + d c + o: seconds of one speculative pass / seconds of one plain pass; also the acceptance length at
    which speculation breaks even. v: verifying the tree / one plain pass; c: one draft step / one plain pass;
    rest (o): everything else of a pass / one plain pass."""
    return v + depth * c + rest


def predicted_speedup(tau: float, v: float, depth: float, c: float, rest: float = 0.0) -> float:
    """The speed model: tau / (v + d c + o)."""
    return tau / pass_cost(v, depth, c, rest)
