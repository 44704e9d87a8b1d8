"""Rounds as they come in: what is kept, how large the next is, when to give up."""

from typing import Any

import pytest

from spechead.data.synthesis.gathered import Gathered, Round
from spechead.errors import UserError
from spechead.target.model import Target


def round_of(prompts: list[str], attempts: int, usable_prompts: int | None = None) -> Round:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": prompt}], "meta": {"kind": "maths"}} for prompt in prompts
    ]
    lost = attempts - len(rows)
    usable = len(rows) if usable_prompts is None else usable_prompts
    return Round(rows=rows, dropped={"answer empty": lost}, attempts=attempts, usable_prompts=usable)


def test_a_round_is_as_large_as_what_is_missing_needs() -> None:
    gathered = Gathered(["prompt 0"], 40)
    assert gathered.next_attempts(256) == 80, "half of the first prompts are expected to be usable"
    assert gathered.next_attempts(64) == 64
    gathered.add(round_of([f"prompt {i}" for i in range(20)], 80))
    assert len(gathered.rows) == 19 and gathered.dropped["prompt is excluded"] == 1
    assert gathered.next_attempts(256) == 87, "21 are missing, and 19 of 80 were usable: 21 / (20 / 82)"
    gathered.add(round_of([f"other {i}" for i in range(20)], 20))
    assert gathered.next_attempts(256) == 8, "one is missing; no round is smaller"
    gathered.add(round_of([f"more {i}" for i in range(5)], 8))
    assert gathered.complete and len(gathered.rows) == 40 and len(gathered.prompts) == 45


def test_a_target_without_usable_text_is_refused_after_enough_of_it(target: Target) -> None:
    gathered = Gathered([], 1000)
    gathered.add(round_of([], 127, usable_prompts=100))
    gathered.refuse_useless(target)
    gathered.add(round_of([], 1))
    with pytest.raises(UserError, match=r"wrote 0 usable conversations of 128 \(128 answer empty\): .*--keep-loops"):
        gathered.refuse_useless(target)


def test_what_was_usable_long_ago_does_not_count(target: Target) -> None:
    gathered = Gathered([], 1000)
    gathered.add(round_of([f"prompt {i}" for i in range(130)], 130))
    gathered.add(round_of([], 130))
    with pytest.raises(UserError, match=r"tiny-llama wrote 0 usable prompts of 130 .*: it does not write user turns"):
        gathered.refuse_useless(target)
