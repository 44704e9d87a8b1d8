"""From the runs of an evaluation to the numbers of its report. Pure arithmetic on counts and seconds.

Knows nothing of models or files. The definitions are those of metrics.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from spechead import metrics
from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats


@dataclass
class Run:
    """One prompt decoded in one way."""

    tokens: list[int]
    seconds: float  # of the whole generation, prefill included
    stats: Stats
    commits: list[tuple[list[int], int]] = field(default_factory=list)  # what on_commit said


@dataclass
class Reference:
    """One prompt decoded by transformers' own generate."""

    tokens: list[int]
    seconds: float
    comparable: bool = True  # False: sampled, from other random numbers than plain decoding


@dataclass
class Comparison:
    """One prompt: plain beside speculative."""

    prompt: Prompt
    plain: Run
    speculative: Run
    reference: Reference | None = None
    divergence: dict[str, Any] | None = None  # None: the tokens are equal
    comparable: bool = True  # False: equality is not asked for, since the rule draws otherwise or is lossy


def divergence(prompt: Prompt, plain: Sequence[int], speculative: Sequence[int]) -> dict[str, Any] | None:
    """The first position where two runs of a prompt differ; a token is None where its run had ended."""
    position = first_difference(plain, speculative)
    if position is None:
        return None
    return {
        "prompt": prompt.question_id,
        "position": position,
        "plain_token": plain[position] if position < len(plain) else None,
        "speculative_token": speculative[position] if position < len(speculative) else None,
        "gap": None,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two sequences of tokens differ, an end included; None if they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def suite(pairs: Sequence[Comparison], about: dict[str, Any]) -> dict[str, Any]:
    """The report's entry for a set of prompts decoded in one way, which `about` describes."""
    stats = [pair.speculative.stats for pair in pairs]
    passes, tokens = sum(s.passes for s in stats), sum(s.tokens for s in stats)
    drafted = [d for s in stats for d in s.drafted]
    accepted = [a for s in stats for a in s.accepted]
    per_prompt = [s.tokens for s in stats], [s.passes for s in stats]
    divergences = [pair.divergence for pair in pairs if pair.divergence is not None]
    checked = sum(pair.comparable for pair in pairs)
    return {
        **about,
        "prompts": len(pairs),
        "passes": passes,
        "tokens": tokens,
        "acceptance_length": metrics.acceptance_length(tokens, passes),
        "acceptance_length_ci": _bounds(metrics.interval(per_prompt, lambda t, p: t / p)),
        "conditional_acceptance": metrics.conditional_acceptance(drafted, accepted),
        "survival": metrics.survival(drafted, accepted),
        "tokens_per_pass": _histogram([c for s in stats for c in s.committed]),
        **_speed([_seconds_and_tokens(pair) for pair in pairs]),
        "without_prefill": _speed([_seconds_and_tokens(pair, prefill=False) for pair in pairs]),
        "generate_ratio": _generate_ratio(pairs),
        "generate_equal": _generate_equal(pairs),
        "lossless": {
            "checked": checked,
            "equal": checked - len(divergences),
            "divergences": divergences,
        },
        "plain_passes": sum(pair.plain.stats.passes for pair in pairs),
        "seconds": _phases([pair.speculative for pair in pairs]),
        "plain_seconds": _phases([pair.plain for pair in pairs]),
        "costs": _costs(pairs),
    }


def rows(pairs: Sequence[Comparison], about: dict[str, Any]) -> list[dict[str, Any]]:
    """One short row a prompt, from which every pooled number can be formed again."""
    return [
        {
            "prompt": pair.prompt.question_id,
            "category": pair.prompt.category,
            **about,
            "tokens": len(pair.speculative.tokens),
            "passes": pair.speculative.stats.passes,
            "committed": pair.speculative.stats.tokens,
            "seconds": round(pair.speculative.seconds, 4),
            "plain_tokens": len(pair.plain.tokens),
            "plain_seconds": round(pair.plain.seconds, 4),
            "equal": pair.divergence is None if pair.comparable else None,
        }
        for pair in pairs
    ]


def predicted(entry: dict[str, Any], v: float) -> dict[str, Any]:
    """The speed model for a suite, without prefill: v as measured apart, the rest as it was per pass.

    Far from the measured speed-up, decoding spends time that the model does not know.
    """
    costs, tau = entry["costs"], entry["acceptance_length"]
    if costs is None or tau is None:
        return {"v": v, "speedup": None}
    verify = v * costs["plain_verify"]
    return {"v": v, "speedup": metrics.predicted_speedup(tau, verify, 1, costs["draft"], costs["rest"])}


# ------------------------------------------------------------------------------------------------ speed

Quad = tuple[float, float, float, float]  # plain seconds, plain tokens, speculative seconds, speculative tokens


def _seconds_and_tokens(pair: Comparison, prefill: bool = True) -> Quad:
    """Without prefill, the first token is left out too: the prefill gives it."""
    if prefill:
        return (
            pair.plain.seconds,
            len(pair.plain.tokens),
            pair.speculative.seconds,
            len(pair.speculative.tokens),
        )
    plain, ours = pair.plain, pair.speculative
    return (
        plain.seconds - plain.stats.seconds["prefill"],
        len(plain.tokens) - 1,
        ours.seconds - ours.stats.seconds["prefill"],
        len(ours.tokens) - 1,
    )


def _speed(quads: Sequence[Quad]) -> dict[str, Any]:
    columns = list(zip(*quads, strict=True))
    plain_seconds, plain_tokens, seconds, tokens = (sum(column) for column in columns)
    usable = [quad for quad in quads if quad[1] and quad[3]]
    each = [metrics.speedup(*quad) for quad in usable]
    return {
        "plain_tokens_per_s": _ratio(plain_tokens, plain_seconds),
        "speculative_tokens_per_s": _ratio(tokens, seconds),
        "speedup": metrics.speedup(plain_seconds, plain_tokens, seconds, tokens) if usable else None,
        "speedup_ci": _bounds(metrics.interval(columns, metrics.speedup)),
        "speedup_macro": _ratio(sum(each), len(each)),
    }


def _generate_ratio(pairs: Sequence[Comparison]) -> float | None:
    """Plain seconds per token / generate's, on the prompts that both ran; above 1, plain is slower."""
    both = [(pair.plain, pair.reference) for pair in pairs if pair.reference is not None]
    if not both:
        return None
    return 1 / metrics.speedup(
        sum(reference.seconds for _, reference in both),
        sum(len(reference.tokens) for _, reference in both),
        sum(plain.seconds for plain, _ in both),
        sum(len(plain.tokens) for plain, _ in both),
    )


def _generate_equal(pairs: Sequence[Comparison]) -> dict[str, int]:
    references = [(pair.plain, pair.reference) for pair in pairs if pair.reference is not None]
    both = [(plain, theirs) for plain, theirs in references if theirs.comparable]
    return {"checked": len(both), "equal": sum(plain.tokens == theirs.tokens for plain, theirs in both)}


def _phases(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds by phase of a report: `keep` counts towards commit, `accept` towards other."""
    spent = [run.stats.seconds for run in runs]
    total = {phase: sum(s[phase] for s in spent) for phase in ("draft", "verify", "commit", "other", "prefill")}
    total["commit"] += sum(s.get("keep", 0.0) for s in spent)
    total["other"] += sum(s.get("accept", 0.0) for s in spent)
    return total


def _costs(pairs: Sequence[Comparison]) -> dict[str, float] | None:
    """What a speculative pass costs, in plain passes: verifying, drafting, the rest; their sum is the
    acceptance length at which speculation breaks even."""
    plain, ours = [pair.plain for pair in pairs], [pair.speculative for pair in pairs]
    plain_passes, passes = (sum(run.stats.passes for run in runs) for runs in (plain, ours))
    if not plain_passes or not passes:
        return None
    spent, base = _phases(ours), _phases(plain)
    unit = sum(base[phase] for phase in ("draft", "verify", "commit", "other")) / plain_passes
    verify, draft = spent["verify"] / passes / unit, spent["draft"] / passes / unit
    rest = (spent["commit"] + spent["other"]) / passes / unit
    return {
        "verify": verify,
        "draft": draft,
        "rest": rest,
        "break_even": metrics.pass_cost(verify, 1, draft, rest),
        "plain_verify": base["verify"] / plain_passes / unit,
    }


def _histogram(committed: Sequence[int]) -> dict[str, int]:
    """Passes by the number of tokens they committed."""
    counts = Counter(committed)
    return {str(n): counts[n] for n in sorted(counts)}


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _bounds(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else list(bounds)
