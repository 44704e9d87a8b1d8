"""How runs become a suite's numbers, with seconds and counts chosen so that each can be checked by hand."""

import json

import pytest

from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats
from spechead.evaluation import aggregate
from spechead.evaluation.aggregate import Comparison, Decoded, Reference


def run(tokens: int, seconds: float, accepted: list[int], depth: int = 2, **phases: float) -> Decoded:
    """`tokens` new tokens, of which the prefill gives one and each pass what it accepted and a bonus."""
    committed = [a + 1 for a in accepted]
    spent = dict.fromkeys(("prefill", "draft", "verify", "commit", "other"), 0.0) | phases
    stats = Stats(len(accepted), sum(committed), committed, [depth] * len(accepted), accepted, spent)
    return Decoded(list(range(tokens)), seconds, stats)


def pair(number: int, plain_seconds: float, seconds: float, accepted: list[int], **options: object) -> Comparison:
    tokens = 1 + sum(a + 1 for a in accepted)
    plain = run(tokens, plain_seconds, [0] * (tokens - 1), depth=0, prefill=1.0, verify=plain_seconds - 1)
    ours = run(tokens, seconds, accepted, prefill=1.0, draft=0.5, verify=seconds - 1.75, commit=0.25)
    return Comparison(Prompt(number, "a", "?"), plain, ours, **options)  # type: ignore[arg-type]


CHAIN = {"tree": "chain:2", "lossy": False}
PAIRS = [pair(1, 7.0, 3.0, [2, 1, 0]), pair(2, 4.0, 4.0, [0, 2])]  # 7 and 5 tokens in 3 and 2 passes


def test_counts_are_pooled_over_passes() -> None:
    entry = aggregate.suite_entry(PAIRS, CHAIN)
    assert (entry["prompts"], entry["passes"], entry["tokens"]) == (2, 5, 10)
    assert entry["acceptance_length"] == 2.0
    assert entry["survival"] == [3 / 5, 2 / 5]
    assert entry["conditional_acceptance"] == [3 / 5, 2 / 3]
    assert entry["tokens_per_pass"] == {"1": 2, "2": 1, "3": 2}
    low, high = entry["acceptance_length_ci"]
    assert (low, high) == (2.0, 2.0)


def test_speed_is_pooled_over_tokens_with_the_macro_mean_beside_it() -> None:
    entry = aggregate.suite_entry(PAIRS, CHAIN)
    assert entry["plain_tokens_per_s"] == pytest.approx(12 / 11)
    assert entry["speculative_tokens_per_s"] == pytest.approx(12 / 7)
    assert entry["speedup"] == pytest.approx(11 / 7)
    assert entry["speedup_macro"] == pytest.approx((7 / 3 + 1) / 2)
    assert entry["speedup_ci"] == pytest.approx([1.0, 7 / 3])


def test_without_prefill_the_first_token_is_left_out_too() -> None:
    entry = aggregate.suite_entry(PAIRS, CHAIN)["without_prefill"]
    assert entry["plain_tokens_per_s"] == pytest.approx(10 / 9)
    assert entry["speculative_tokens_per_s"] == pytest.approx(10 / 5)
    assert entry["speedup"] == pytest.approx(9 / 5)


def test_costs_and_prediction_follow_the_speed_model() -> None:
    entry = aggregate.suite_entry([pair(1, 7.0, 3.0, [2, 1, 0])], CHAIN)
    # plain: 6 passes in 6 s. Speculative: 3 passes, verify 1.25 s, draft 0.5 s, commit 0.25 s.
    assert entry["costs"] == pytest.approx(
        {"verify": 1.25 / 3, "draft": 0.5 / 3, "rest": 0.25 / 3, "break_even": 2 / 3, "plain_verify": 1.0}
    )
    assert entry["seconds"] == pytest.approx(
        {"draft": 0.5, "verify": 1.25, "commit": 0.25, "other": 0.0, "prefill": 1.0}
    )
    assert aggregate.prediction(entry, v=1.75) == {"v": 1.75, "speedup": pytest.approx(2.0 / (1.75 + 0.25))}
    assert entry["without_prefill"]["speedup"] == pytest.approx(2.0 / (2 / 3))


def test_accept_counts_towards_other_and_keep_towards_commit() -> None:
    before = aggregate.suite_entry([pair(1, 7.0, 3.0, [2, 1, 0])], CHAIN)
    accepted, kept = pair(1, 7.0, 3.0, [2, 1, 0]), pair(1, 7.0, 3.0, [2, 1, 0])
    kept.speculative.stats.seconds["keep"] = 0.5
    seconds = aggregate.suite_entry([kept], CHAIN)["seconds"]
    assert seconds == before["seconds"] | {"commit": before["seconds"]["commit"] + 0.5}
    accepted.speculative.stats.seconds["accept"] = 0.75
    accepted.plain.stats.seconds["accept"] = 1.5
    entry = aggregate.suite_entry([accepted], CHAIN)
    assert entry["seconds"] == before["seconds"] | {"other": before["seconds"]["other"] + 0.75}
    assert entry["plain_seconds"]["other"] == before["plain_seconds"]["other"] + 1.5
    assert entry["costs"]["rest"] == pytest.approx((0.25 + 0.75) / 3 / (7.5 / 6))


def test_generate_is_compared_on_the_prompts_that_it_ran() -> None:
    with_reference = pair(1, 6.0, 3.0, [2, 1, 0], reference=Reference(list(range(7)), 5.0))
    entry = aggregate.suite_entry([with_reference, pair(2, 50.0, 4.0, [0, 2])], CHAIN)
    assert entry["generate_ratio"] == pytest.approx(6 / 5)
    assert entry["generate_equal"] == {"checked": 1, "equal": 1}
    assert aggregate.suite_entry(PAIRS, CHAIN)["generate_ratio"] is None
    sampled = pair(1, 6.0, 3.0, [2, 1, 0], reference=Reference([9], 5.0, comparable=False))
    assert aggregate.suite_entry([sampled], CHAIN)["generate_equal"] == {"checked": 0, "equal": 0}


def test_divergences_are_listed_and_counted() -> None:
    where = {"prompt": 2, "position": 3, "plain_token": 1, "speculative_token": 2, "gap": 0.1}
    entry = aggregate.suite_entry([PAIRS[0], pair(2, 4.0, 4.0, [0, 2], divergence=where)], CHAIN)
    assert entry["lossless"] == {"checked": 2, "equal": 1, "divergences": [where]}
    assert [row["equal"] for row in aggregate.prompt_rows([PAIRS[0], pair(2, 4, 4, [0], divergence=where)], CHAIN)] == [
        True,
        False,
    ]


def test_nothing_is_said_of_the_equality_of_pairs_that_cannot_be_compared() -> None:
    pairs = [pair(1, 7.0, 3.0, [2, 1, 0], comparable=False), pair(2, 4.0, 4.0, [0, 2], comparable=False)]
    entry = aggregate.suite_entry(pairs, CHAIN)
    assert entry["lossless"] == {"checked": 0, "equal": 0, "divergences": []}
    assert entry["acceptance_length"] == 2.0
    assert [row["equal"] for row in aggregate.prompt_rows(pairs, CHAIN)] == [None, None]


def test_suites_and_rows_carry_what_they_are_about() -> None:
    about = {"drafter": "prompt_lookup", "tree": "chain:2", "rule": "typical", "lossy": True}
    assert aggregate.suite_entry(PAIRS, about).items() >= about.items()
    assert all(row.items() >= about.items() for row in aggregate.prompt_rows(PAIRS, about))


@pytest.mark.parametrize(
    ("plain", "ours", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], (1, 2, 5)),
        ([1, 2, 3], [1, 2], (2, 3, None)),
        ([1, 2], [1, 2, 3], (2, None, 3)),
    ],
)
def test_divergence(plain: list[int], ours: list[int], expected: tuple[int, int | None, int | None] | None) -> None:
    found = aggregate.divergence(Prompt("q", "a", "?"), plain, ours)
    if expected is None:
        assert found is None
    else:
        assert found is not None and found["prompt"] == "q"
        assert (found["position"], found["plain_token"], found["speculative_token"]) == expected


def test_answers_of_one_token_leave_gaps_not_errors() -> None:
    entry = aggregate.suite_entry([pair(1, 1.5, 1.5, [])], CHAIN)
    assert entry["acceptance_length"] is None and entry["acceptance_length_ci"] is None
    assert entry["costs"] is None and entry["survival"] == []
    assert entry["without_prefill"]["speedup"] is None
    assert entry["speedup"] == 1.0
    assert aggregate.prediction(entry, 1.2) == {"v": 1.2, "speedup": None}
    json.dumps(entry, allow_nan=False)


def test_equal_prompts_with_one_empty_answer_stay_finite() -> None:
    entry = aggregate.suite_entry([pair(1, 1.5, 1.5, []), PAIRS[0]], CHAIN)
    assert entry["acceptance_length"] == 2.0 and entry["acceptance_length_ci"] == [2.0, 2.0]
    json.dumps(entry, allow_nan=False)
