"""Values of the target that are not finite stop decoding, wherever they appear."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spechead.decoding.generate import Speculation, generate, generate_batch
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import chain
from spechead.drafters.draft_model import DraftModel
from spechead.errors import UserError
from spechead.target.model import Target
from tests.helpers.drafters import TREE, RandomDrafter, prompt_of
from tests.helpers.targets import make_target

SPOILT = 12  # the position from which on values are not finite
STATES = "target 'tiny-gpt2' in float32 computes hidden states after the final norm that are not finite"


def spoil(target: Target) -> None:
    target.model.transformer.wpe.weight[SPOILT] = math.inf


SPOILS: dict[str, Callable[[Any], Any]] = {  # of a llama, before it is loaded
    "hidden states after the final norm": lambda model: model.model.layers[-1].mlp.down_proj.weight,
    "logits": lambda model: model.lm_head.weight,
}


@pytest.mark.parametrize("what", SPOILS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_target_is_refused_at_load(what: str, value: float) -> None:
    target = make_target()
    SPOILS[what](target.model)[5, 0] = value
    with pytest.raises(UserError, match=f"target 'x' in float32 computes {what} that are not finite .*damaged"):
        Target(target.model, target.tokenizer, "x")


def test_an_overflow_of_float16_has_a_remedy() -> None:
    target = make_target()
    target.model.lm_head.weight *= 60_000
    assert Target(target.model, target.tokenizer, "x")
    target.model.half()
    with pytest.raises(UserError, match="'x' in float16 computes logits that .*; use --dtype bfloat16 or float32"):
        Target(target.model, target.tokenizer, "x")


@pytest.mark.parametrize("what", SPOILS)
def test_the_prefill_is_checked(what: str) -> None:
    target = make_target()
    SPOILS[what](target.model)[5, 0] = -math.inf
    with pytest.raises(UserError, match=f"computes {what} that are not finite"):
        generate(target, prompt_of(9), max_new_tokens=5)


RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampler": Sampler(0.9, top_k=20, top_p=0.9, min_p=0.01)},
    "rejection": {"sampler": Sampler(0.9), "speculation": Speculation(chain(3), draft_temperature=1.0)},
    "typical": {"sampler": Sampler(0.9), "speculation": Speculation(chain(3), "typical")},
    "typical, greedy": {"speculation": Speculation(chain(3), "typical")},
    "tree": {"speculation": Speculation(TREE)},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_later_pass_is_checked_under_every_rule(rule: str) -> None:
    target = make_target("gpt2")
    arguments = RULES[rule] | {"max_new_tokens": 9}
    speculation = arguments.get("speculation")
    drafter = DraftModel(target, target) if speculation else None
    before = generate(target, prompt_of(9), drafter, **arguments)
    spoil(target)
    written: list[int] = []
    with pytest.raises(UserError, match=STATES):
        generate(target, prompt_of(9), drafter, on_commit=lambda tokens, _: written.extend(tokens), **arguments)
    assert 1 <= len(written) <= SPOILT + 1 - 9 and written == before.tokens[: len(written)]


def test_a_batch_stops_for_any_of_its_texts() -> None:
    target = make_target("gpt2")
    spoil(target)
    assert len(generate(target, prompt_of(5), max_new_tokens=5).tokens) == 5
    with pytest.raises(UserError, match=STATES):
        generate_batch(target, [prompt_of(2), prompt_of(9)], RandomDrafter(1), max_new_tokens=8)


def test_masked_tokens_of_a_processor_are_no_fault(target: Target) -> None:
    def only_even(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(1, torch.arange(1, logits.shape[1], 2), -math.inf)

    text = generate(target, prompt_of(9), max_new_tokens=5, sampler=Sampler(processors=[only_even])).tokens
    assert len(text) == 5 and not any(token % 2 for token in text)
