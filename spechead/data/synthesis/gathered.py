"""The conversations of all rounds so far: which are left out, how large the next round is, and when to give up."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypedDict

from spechead.data.synthesis.filters import SeenPrompts
from spechead.errors import UserError
from spechead.target.model import Target

MIN_ROUND = 8  # prompts
MIN_USABLE_SHARE = 0.02  # a target whose prompts or answers pass the filters less often is refused
MIN_ATTEMPTS = 128  # prompts before that is judged
Row = dict[str, Any]


class Round(TypedDict):
    """The result of one round, as its file stores it."""

    rows: list[Row]
    dropped: dict[str, int]  # by reason
    attempts: int  # first messages that were written
    usable_prompts: int  # of these


class Gathered:
    """The rows of all rounds so far, in order, without excluded prompts."""

    def __init__(self, excluded: list[str], count: int) -> None:
        self.rounds = self.attempts = 0
        self.rows: list[Row] = []
        self.prompts: list[str] = []  # including those of excluded rows, so that they are not written again
        self.kinds: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._count = count
        self._lately: list[Round] = []  # rounds of MIN_ATTEMPTS prompts or, until then, fewer
        self._excluded = SeenPrompts()
        for prompt in excluded:
            self._excluded.add(prompt)

    @property
    def complete(self) -> bool:
        return len(self.rows) >= self._count

    def next_attempts(self, most: int) -> int:
        """First messages that the next round needs, given the share of them that became a row so far."""
        share = (len(self.rows) + 1) / (self.attempts + 2)  # one half before the first (Laplace's rule)
        needed = math.ceil((self._count - len(self.rows)) / share)
        return min(most, max(MIN_ROUND, needed))

    def add(self, round_: Round) -> int:
        """Add the rows of the next round; returns how many were new."""
        before = len(self.rows)
        self.rounds += 1
        self.attempts += round_["attempts"]
        self._lately = [round_] if attempts(self._lately) >= MIN_ATTEMPTS else [*self._lately, round_]
        self.dropped.update(round_["dropped"])
        for row in round_["rows"]:
            messages = [message["content"] for message in row["messages"] if message["role"] == "user"]
            self.prompts.append(messages[0])
            self.kinds[row["meta"]["kind"]] += 1
            if any(map(self._excluded.contains, messages)):
                self.dropped["prompt is excluded"] += 1
            elif not self.complete:
                self.rows.append(row)
        return len(self.rows) - before

    def refuse_useless(self, target: Target) -> None:
        """Raise UserError where next to nothing that the target wrote lately is usable."""
        tried = attempts(self._lately)
        if tried < MIN_ATTEMPTS:
            return
        dropped = sum((Counter(round_["dropped"]) for round_ in self._lately), Counter[str]())
        prompts = sum(round_["usable_prompts"] for round_ in self._lately)
        rows = sum(len(round_["rows"]) for round_ in self._lately)
        for usable, what, remedy in (
            (prompts, "prompts", "it does not write user turns, use a chat model"),
            (rows, "conversations", "use another target, or keep repetitive answers with --keep-loops true"),
        ):
            if usable < MIN_USABLE_SHARE * tried:
                wrote = f"wrote {usable} usable {what} of {tried} ({describe_counts(dropped)})"
                raise UserError(f"target {target.name} {wrote}: {remedy}")


def attempts(rounds: Sequence[Round]) -> int:
    return sum(round_["attempts"] for round_ in rounds)


def describe_counts(counts: Counter[str], most: int = 0) -> str:
    """`3 no user turn, 1 not valid JSON`; `most`: how many reasons are named, 0 for all."""
    shown = [f"{count} {reason}" for reason, count in counts.most_common(most or None)]
    left = len(counts) - len(shown)
    return ", ".join(shown + [f"and {left} other reasons"] * (left > 0))
