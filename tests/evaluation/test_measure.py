"""Prompts encoded, modes of drafting, timed outputs and the costs of a pass, on a tiny target."""

from __future__ import annotations

from typing import Any

import pytest

from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats, generate
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan, chain, parse_tree
from spechead.errors import UserError
from spechead.evaluation import measure
from spechead.evaluation.aggregate import Decoded, Reference
from spechead.evaluation.measure import MeasureOptions, Mode, Question
from spechead.target.model import Target
from tests.helpers.drafters import Scripted
from tests.helpers.targets import make_target

PROMPTS = [Prompt(1, "a", "one and two"), Prompt(2, "b", "three?")]


def question(ids: list[int], max_new_tokens: int) -> Question:
    return Question(PROMPTS[0], ids, max_new_tokens)


def test_prompts_are_encoded_with_seeds_and_the_room_that_is_left(target: Target) -> None:
    options = MeasureOptions(target="tiny", max_new_tokens=10_000)
    first, second = measure.encode_prompts(PROMPTS, target, options, seed=7)
    assert (first.seed, second.seed) == (7, 8)
    assert [q.max_new_tokens for q in (first, second)] == [target.max_positions - len(q.ids) for q in (first, second)]
    assert first.shortened().max_new_tokens == measure.WARM_UP_TOKENS and first.shortened().ids == first.ids


def test_a_prompt_without_room_is_named() -> None:
    target = make_target()
    target.max_positions = 10
    with pytest.raises(
        UserError, match=r"option prompts: prompt 1 has \d+ tokens, too many for target 'tiny-llama', which has 10 pos"
    ):
        measure.encode_prompts(PROMPTS, target, MeasureOptions(target="tiny"))


def test_a_mode_is_named_by_its_tree_where_that_is_not_the_drafters_own() -> None:
    drafter = Scripted([], 0, chain(3))

    def name(plan: Plan, *, requested: bool, head: bool) -> str:
        return Mode("lookup", drafter, plan, requested, head).name

    assert name(chain(3), requested=False, head=False) == "lookup"
    assert name(chain(3), requested=False, head=True) == name(chain(3), requested=True, head=False) == "lookup chain:3"


def test_drafters_take_the_trees_that_they_can_draft(target: Target) -> None:
    options = MeasureOptions(target="tiny", drafter=["prompt_lookup", "self:0-3"], tree=["static:[[0],[1]]", "chain:2"])
    assert options.plans == [parse_tree(tree) for tree in options.tree]
    names = [mode.name for mode in measure.make_modes(options, target)]
    assert names == ["prompt_lookup chain:2", "self:0-3 static:[[0],[1]]", "self:0-3 chain:2"]
    own = MeasureOptions(target="tiny", drafter=["prompt_lookup"], tree=["static:[[0],[1]]"])
    assert [mode.name for mode in measure.make_modes(own, target)] == ["prompt_lookup"]


def test_outputs_carry_tokens_seconds_and_commits(target: Target) -> None:
    ids = list(range(5, 14))
    plain = generate(target, ids, max_new_tokens=8).tokens
    output = measure.decode(target, question(ids, 8))
    assert output.tokens == plain and output.seconds > 0 and output.stats.passes == 7
    assert [token for tokens, _ in output.commits for token in tokens] == plain
    reference = measure.decode_by_generate(target, question(ids, 8))
    assert reference.tokens == plain and reference.comparable and reference.seconds > 0


GENERATION: list[dict[str, Any]] = [  # each of which changes what generate writes or returns
    {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 5.0},
    {"num_beams": 3, "num_return_sequences": 2},
    {"suppress_tokens": list(range(0, 97, 2))},
    {"begin_suppress_tokens": list(range(3, 97))},
    {"bad_words_ids": [[token] for token in range(3, 90)]},
    {"forced_eos_token_id": 7},
    {"do_sample": True, "temperature": 5.0, "top_k": 7},
    {"return_dict_in_generate": True, "output_scores": True},
    {"min_new_tokens": 8, "max_length": 3},
    {"max_time": 0.0},
    {"stop_strings": ["a"]},
    {"guidance_scale": 2.0},
]


@pytest.mark.parametrize("settings", GENERATION, ids=lambda settings: next(iter(settings)))
def test_generate_does_not_follow_the_models_generation_config(settings: dict[str, Any]) -> None:
    ids = list(range(5, 14))
    plain = generate(make_target(), ids, max_new_tokens=8).tokens
    model = make_target().model
    model.generation_config.update(**settings)
    target = Target(model, make_target().tokenizer, "x")
    assert target.ignored_generation == settings
    before = model.generation_config.to_dict()
    assert generate(target, ids, max_new_tokens=8).tokens == plain
    assert measure.decode_by_generate(target, question(ids, 8)).tokens == plain
    assert model.generation_config.to_dict() == before  # the model is left as it was
    penalised = generate(target, ids, max_new_tokens=8, sampler=Sampler(repetition_penalty=1.5)).tokens
    chosen = measure.decode_by_generate(target, question(ids, 8), repetition_penalty=1.5)
    assert chosen.tokens == penalised != plain


def test_verify_costs_give_one_ratio_for_each_size(target: Target) -> None:
    costs = measure.verify_costs(target, [4, 9, 4], past=20, repeats=2)
    assert len(costs) == 3 and min(costs) > 0 and costs[0] == costs[2]


def test_a_target_of_few_positions_is_measured_as_far_as_it_goes() -> None:
    target = make_target()
    target.max_positions = 30
    outputs: list[Decoded | Reference] = [Decoded([5, 6, 7, 8, 9], 1.0, Stats()), Reference([5, 6, 7, 8, 9], 1.0)]
    past, v = measure.passes_by_size(target, [question(list(range(5, 25)), 6)] * 2, outputs)
    assert list(v) == ["1", "2", "3", "4", "6", "8", "12", "16", "24"] and past == 6


def test_the_machine_is_described() -> None:
    machine = measure.describe_machine(make_target().device)
    assert machine["threads"] >= 1 and machine["processor"] and "accelerator" not in machine
