"""Every head of HEADS on tiny targets: alignment, training equals drafting, overfitting, losslessness, saving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
import torch

from spechead.data.dataset import Batch, collate
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.heads import HEADS, Head
from spechead.heads.base import Role, ahead, options_with
from spechead.options import Range, check_ranges
from spechead.target.cache import KVBuffer
from spechead.target.model import Target
from tests.helpers.heads import PLANS, VARIANTS, draft_ids, fit, make_head, one_row, sample, step
from tests.helpers.targets import FAMILIES, make_target


@pytest.mark.parametrize("kind", HEADS)
def test_a_loaded_vocabulary_is_the_one_that_computes(kind: str, target: Target) -> None:
    """Also where another one was counted, and looked at, before: a resumed run on data that would give it."""
    head, other = (make_head(kind, target, draft_vocab_size=8) for _ in range(2))
    ids = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89])
    other.set_vocabulary(ids)
    assert draft_ids(head).tolist() != ids.tolist() and not head.to_draft(ids)[1].all()
    head.load_state_dict(other.state_dict())
    assert draft_ids(head).tolist() == ids.tolist()
    assert head.to_draft(ids)[0].tolist() == list(range(8)) and head.to_draft(ids)[1].all()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@torch.no_grad()
def test_validation_scores_drafts_up_to_the_trees_depth(kind: str, target: Target) -> None:
    """However many steps training unrolls; the loss is of those alone."""
    batch = collate([sample(target)], 64)
    head = make_head(kind, target, steps=2)
    results = {}
    for depth in (1, 2, 4):
        head.eval().tree = chain(depth)
        results[depth] = step(head, batch)
        assert results[depth].hits.correct.shape[0] == depth
    assert results[2].loss == results[4].loss != results[1].loss
    assert torch.equal(results[2].hits.correct, results[4].hits.correct[:2])
    assert head.train().scored_depth == 2 and step(head, batch).hits.correct.shape[0] == 2


# ------------------------------------------------------------------------------------------------ alignment


def pairs(batch: Batch, n: int) -> list[tuple[int, int]]:
    ids, supervised = ahead(batch, n)
    return [(t, int(ids[0, t])) for t in range(ids.shape[1]) if supervised[0, t]]


def test_alignment_by_hand() -> None:
    batch = one_row([0, 0, 0, 1, 1, 1])  # tokens 10..15, the answer is 13, 14, 15
    assert pairs(batch, 1) == [(2, 13), (3, 14), (4, 15)]
    assert pairs(batch, 2) == [(1, 13), (2, 14), (3, 15)]  # EAGLE's first draft, Medusa head 0
    assert pairs(batch, 3) == [(0, 13), (1, 14), (2, 15)]
    assert pairs(batch, 5) == [(0, 15)]
    assert pairs(batch, 6) == []


def test_alignment_over_two_turns_and_two_documents() -> None:
    turns = one_row([0, 1, 1, 0, 0, 1])
    # row 0 predicts 12, row 3 predicts 15; 11 has no row two before
    assert pairs(turns, 2) == [(0, 12), (3, 15)]
    packed = one_row([0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1])
    assert pairs(packed, 1) == [(0, 11), (1, 12), (3, 14), (4, 15)]
    assert pairs(packed, 2) == [(0, 12), (3, 15)]  # row 2 would predict across the border
    padded = one_row([0, 1, 1, 0], [0, 0, 0, -1])
    assert pairs(padded, 2) == [(0, 12)]


@pytest.mark.parametrize("kind", HEADS)
def test_prompt_and_padding_leave_the_loss_alone(kind: str, target: Target) -> None:
    head = make_head(kind, target)
    one, two = sample(target, seed=3), sample(target, seed=4)
    alone = sum(float(step(head, collate([text], 64)).loss.detach()) for text in (one, two))
    packed = collate([one, two], 64)
    assert packed.ids.shape[0] == 1
    padded = collate([one, two], max(len(one.ids), len(two.ids)))
    assert padded.ids.shape[0] == 2
    assert float(step(head, packed).loss.detach()) == pytest.approx(alone, rel=1e-5)
    assert float(step(head, padded).loss.detach()) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_every_parameter_gets_a_gradient(kind: str, target: Target) -> None:
    check_gradients(make_head(kind, target))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_of_a_variant_gets_a_gradient(variant: str, make_variant: Callable[[str], Head]) -> None:
    check_gradients(make_variant(variant))


def check_gradients(head: Head) -> None:
    step(head, collate([sample(head.target)], 64)).loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


# ------------------------------------------------------------------------------------------------ training = drafting


def test_rows_keep_a_path() -> None:
    rows = KVBuffer()
    values = torch.arange(6.0).view(1, 1, 6, 1)
    rows.append(values[:, :, :2], values[:, :, :2])
    keys, _ = rows.append(values[:, :, 2:], values[:, :, 2:])
    assert keys.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    rows.move(torch.tensor([0, 0]), torch.tensor([2, 5]), torch.tensor([2, 3]))
    rows.crop(4)
    keys, _ = rows.append(values[:, :, :1] + 9, values[:, :, :1] + 9)
    assert keys.flatten().tolist() == [0, 1, 2, 5, 9]


# ------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", HEADS)
def test_lossless_in_every_family(kind: str, family: str) -> None:
    target = make_target(family)
    prompt = sample(target, 1).ids.tolist()
    expected = generate(target, prompt, max_new_tokens=24).tokens
    head = make_head(kind, target)
    for plan in PLANS:
        assert generate(target, prompt, head, speculation=Speculation(plan), max_new_tokens=24).tokens == expected, str(
            plan
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_lossless(variant: str, make_variant: Callable[[str], Head]) -> None:
    head = make_variant(variant)
    prompt = sample(head.target, 1).ids.tolist()
    expected = generate(head.target, prompt, max_new_tokens=16).tokens
    for plan in PLANS:
        found = generate(head.target, prompt, head, speculation=Speculation(plan), max_new_tokens=16)
        assert found.tokens == expected, str(plan)


@pytest.mark.parametrize("kind", HEADS)
def test_overfit_decodes_at_its_full_depth(kind: str, target: Target) -> None:
    # a random target's own distribution is nearly flat, and its likeliest tokens lie close together
    peaked: dict[str, dict[str, Any]] = {"eagle": {"topk_weight": 0.0}, "eagle3": {"loss": "hard_ce"}}
    head = make_head(kind, target, draft_vocab_size=0, **peaked.get(kind, {}))
    text = sample(target, 24)
    fit(head, collate([text], 64), 300)
    prompt = text.ids[:8].tolist()
    for plan in PLANS:
        result = generate(target, prompt, head, speculation=Speculation(plan), max_new_tokens=24)
        assert result.tokens == text.ids[8:].tolist()
        full = [min(4, deep) for deep in result.stats.drafted]
        assert result.stats.accepted == full, str(plan)


# ------------------------------------------------------------------------------------------------ save and load


@pytest.mark.parametrize("kind", HEADS)
def test_every_number_among_the_options_has_a_range_and_every_option_a_role(kind: str) -> None:
    hints = get_type_hints(HEADS[kind].Config, include_extras=True)
    assert options_with(HEADS[kind].Config, *Role) == list(hints)
    for name, hint in hints.items():
        if any(isinstance(part, Range) for part in hint.__metadata__):
            with pytest.raises(UserError, match=rf"option head\.options\.{name}: must be "):
                check_ranges(replace(HEADS[kind].Config(), **{name: -1}), "head.options.")
        else:
            assert hint.__origin__ not in (int, float), name


def test_options_by_role() -> None:
    assert options_with(HEADS["medusa"].Config, Role.COUNT) == ["n_heads", "n_layers"]
    assert options_with(HEADS["eagle3"].Config, Role.COUNT, Role.TENSORS) == ["n_layers", "norm_before_fc", "fc_norm"]
    assert "head_dim" in options_with(HEADS["eagle"].Config, Role.MEANING)
