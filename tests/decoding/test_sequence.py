"""One sequence: how it ends, what it counts, and the speculation that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spechead.decoding.sampling import Sampler
from spechead.decoding.sequence import ActiveSequence, Speculation
from spechead.decoding.tree import Dynamic, chain, parse_tree
from spechead.decoding.verify import Accepted
from spechead.errors import UserError
from spechead.target.model import Target, TargetOutput

ROW = TargetOutput(torch.zeros(1, 1, 32), torch.zeros(1, 1, 0))


def begun(target: Target, cap: int = 9, stop: tuple[str, ...] = (), **more: Any) -> ActiveSequence:
    """A sequence after the prefill, whose first token is 5."""
    sequence = ActiveSequence(target, [7, 8], Sampler(), Speculation(**more), cap, stop, keep_gaps=False)
    sequence.begin(ROW, torch.eye(97)[5][None], None)
    return sequence


def test_tokens_after_the_end_are_not_committed(target: Target) -> None:
    for cap, eos, reason in ((9, {11}, "eos"), (3, {2}, "length")):
        sequence = begun(target, cap)
        target_eos, target.eos_ids = target.eos_ids, frozenset(eos)
        try:
            sequence.commit(Accepted([0, 1, 2], [10, 11, 12]), ROW)
        finally:
            target.eos_ids = target_eos
        assert sequence.finish_reason == reason and sequence.ids.tolist() == [7, 8, 5, 10, 11]
        stats = sequence.generation({"draft": 1.0}).stats
        assert (stats.passes, stats.tokens, stats.committed) == (1, 2, [2]) and stats.seconds == {"draft": 1.0}


def test_a_stop_string_ends_the_sequence(target: Target) -> None:
    stop = target.tokenizer.decode([10, 11])
    sequence = begun(target, stop=(stop, ""))
    sequence.commit(Accepted([0], [10]), ROW)
    assert not sequence.finish_reason
    sequence.commit(Accepted([0, 1], [11, 12]), ROW)
    assert sequence.finish_reason == "stop" and sequence.tokens == [5, 10, 11]


def test_commits_are_reported_with_their_drafts(target: Target) -> None:
    sequence, calls = begun(target, cap=3), []
    sequence.on_commit = lambda tokens, accepted: calls.append((tokens, accepted))
    sequence.commit(Accepted([0, 1, 2, 3], [10, 11, 12, 13]), ROW)
    assert calls == [([10, 11], 2)], "no more drafts than tokens"


def test_the_rule_follows_from_the_drafts() -> None:
    assert Speculation().rule == "exact_match" and Speculation(draft_temperature=0.5).rule == "rejection"
    assert Speculation(rule="typical", draft_temperature=0.5).rule == "typical"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rule": "luck"}, "option rule: must be one of exact_match, rejection, block, typical, got 'luck'"),
        ({"rule": "rejection"}, "option rule: rejection needs sampled drafts; set draft_temperature above 0"),
        ({"draft_temperature": -1.0}, "option draft_temperature: must be at least 0, got -1.0"),
        ({"draft_temperature": 1.0, "tree": Dynamic(4, 2, 2)}, "option tree: dynamic:.* cannot sample its drafts"),
        (
            {"rule": "block", "draft_temperature": 1.0, "tree": parse_tree("static:[[0],[1],[0,0]]")},
            r"option rule: block needs a chain, not static:.*; use chain:2 or the rule rejection",
        ),
    ],
)
def test_speculation_that_does_not_fit_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Speculation(**wrong)
    assert Speculation(chain(4), "block", 1.0).rule == "block"


@pytest.mark.parametrize(
    ("prompt", "cap", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([5], 0, "option max_new_tokens: must be at least 1, got 0"),
        ([5] * 256, 5, "the prompt has 256 tokens, but target 'tiny-llama' has 256 positions"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_named(target: Target, prompt: list[int], cap: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ActiveSequence(target, prompt, Sampler(), Speculation(), cap, (), keep_gaps=False)
