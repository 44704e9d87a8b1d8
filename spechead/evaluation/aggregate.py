"""Pool decoded prompts into the numbers of a report, by the definitions of metrics.py."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from spechead import metrics
from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats


@dataclass
class Decoded:
    """One prompt decoded in one way."""

    tokens: list[int]
    seconds: float  # of the whole generation, prefill included
    stats: Stats
    commits: list[tuple[list[int], int]] = field(default_factory=list)  # (tokens, accepted drafts) of each pass


@dataclass
class Reference:
    """One prompt decoded by transformers' own generate."""

    tokens: list[int]
    seconds: float
    comparable: bool = True  # False: sampled, with other random numbers than plain decoding


@dataclass
class Comparison:
    """One prompt, decoded plainly and speculatively."""

    prompt: Prompt
    plain: Decoded
    speculative: Decoded
    reference: Reference | None = None
    divergence: dict[str, Any] | None = None  # None: the tokens are equal
    comparable: bool = True  # False: equality is not required: the rule samples differently or is lossy


def divergence(prompt: Prompt, plain: Sequence[int], speculative: Sequence[int]) -> dict[str, Any] | None:
    """The first position where two outputs of a prompt differ; a token is None if its output had ended."""
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


def suite_entry(pairs: Sequence[Comparison], labels: dict[str, Any]) -> dict[str, Any]:
    """The report's entry of a suite: a set of prompts decoded in one way, which `labels` describe."""
    stats = [pair.speculative.stats for pair in pairs]
    passes, tokens = sum(s.passes for s in stats), sum(s.tokens for s in stats)
    drafted = [d for s in stats for d in s.drafted]
    accepted = [a for s in stats for a in s.accepted]
    per_prompt = [s.tokens for s in stats], [s.passes for s in stats]
    divergences = [pair.divergence for pair in pairs if pair.divergence is not None]
    checked = sum(pair.comparable for pair in pairs)
    return {
        **labels,
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
        "lossless": {"checked": checked, "equal": checked - len(divergences), "divergences": divergences},
        "plain_passes": sum(pair.plain.stats.passes for pair in pairs),
        "seconds": _phases([pair.speculative for pair in pairs]),
        "plain_seconds": _phases([pair.plain for pair in pairs]),
        "costs": _costs(pairs),
    }


def prompt_rows(pairs: Sequence[Comparison], labels: dict[str, Any]) -> list[dict[str, Any]]:
    """One short row per prompt, from which the pooled numbers can be computed again."""
    return [
        {
            "prompt": pair.prompt.question_id,
            "category": pair.prompt.category,
            **labels,
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


def prediction(entry: dict[str, Any], v: float) -> dict[str, Any]:
    """The speed model for a suite, without prefill: v is measured separately, the rest is the suite's own per pass.

    If it is far from the measured speed-up, decoding spends time that the model does not cover.
    """
    costs, tau = entry["costs"], entry["acceptance_length"]
    if costs is None or tau is None:
        return {"v": v, "speedup": None}
    verify = v * costs["plain_verify"]
    return {"v": v, "speedup": metrics.predicted_speedup(tau, verify, 1, costs["draft"], costs["rest"])}


# ------------------------------------------------------------------------------------------------ speed

Quad = tuple[float, float, float, float]  # plain seconds, plain tokens, speculative seconds, speculative tokens


def _seconds_and_tokens(pair: Comparison, prefill: bool = True) -> Quad:
    """Without prefill, the first token is left out too: the prefill yields it."""
    plain, speculative = pair.plain, pair.speculative
    if prefill:
        return plain.seconds, len(plain.tokens), speculative.seconds, len(speculative.tokens)
    return (
        plain.seconds - plain.stats.seconds["prefill"],
        len(plain.tokens) - 1,
        speculative.seconds - speculative.stats.seconds["prefill"],
        len(speculative.tokens) - 1,
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
    """Plain seconds per token / generate's, on the prompts that both decoded; above 1, plain is slower."""
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
    both = [(plain, reference) for plain, reference in references if reference.comparable]
    return {"checked": len(both), "equal": sum(plain.tokens == reference.tokens for plain, reference in both)}


def _phases(outputs: Sequence[Decoded]) -> dict[str, float]:
    """Seconds by the phases of a report, in which `keep` counts towards commit and `accept` towards other."""
    spent = [output.stats.seconds for output in outputs]
    total = {phase: sum(s[phase] for s in spent) for phase in ("draft", "verify", "commit", "other", "prefill")}
    total["commit"] += sum(s.get("keep", 0.0) for s in spent)
    total["other"] += sum(s.get("accept", 0.0) for s in spent)
    return total


def _costs(pairs: Sequence[Comparison]) -> dict[str, float] | None:
    """The cost of a speculative pass in plain passes: verifying, drafting, the rest; their sum is the acceptance
    length at which speculation breaks even."""
    plain, speculative = [pair.plain for pair in pairs], [pair.speculative for pair in pairs]
    plain_passes, passes = (sum(output.stats.passes for output in way) for way in (plain, speculative))
    if not plain_passes or not passes:
        return None
    spent, base = _phases(speculative), _phases(plain)
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
