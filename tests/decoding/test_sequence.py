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
from tests.helpers.targets import make_target

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
        ([5] * 256, 5, "the prompt has 256 tokens, but target 'tiny-llama' has 256 positions$"),
        ([5, 97, -1, 98], 5, "token ids -1, 97, 98, but the embedding of target 'tiny-llama' has 97 rows"),
        (range(90, 110), 5, "token ids 97, 98, 99, 100, 101 and 8 more, but"),
        ([[5, 6]], 5, "a prompt must be a sequence of token ids"),
        (torch.tensor([[5, 6]]), 5, "a prompt must be a sequence of token ids"),
        (torch.tensor([5.0]), 5, "a prompt must be a sequence of token ids"),
        (torch.tensor(5), 5, "a prompt must be a sequence of token ids"),
        ("abc", 5, "a prompt must be a sequence of token ids"),
        (None, 5, "a prompt must be a sequence of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_named(target: Target, prompt: Any, cap: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ActiveSequence(target, prompt, Sampler(), Speculation(), cap, (), keep_gaps=False)


def test_a_prompt_may_be_any_sequence_of_ids(target: Target) -> None:
    prompts: list[Any] = [(5, 6), torch.tensor([5, 6]), torch.tensor([5, 6], dtype=torch.int32).numpy(), range(5, 7)]
    for prompt in prompts:
        sequence = ActiveSequence(target, prompt, Sampler(), Speculation(), 3, (), keep_gaps=False)
        assert sequence.ids.tolist() == [5, 6]


def test_positions_that_end_early_are_explained() -> None:
    target = make_target()
    target.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UserError, match=r"has 256 positions \(beyond them its dynamic rotary scaling would change"):
        ActiveSequence(target, [5] * 256, Sampler(), Speculation(), 3, (), keep_gaps=False)
