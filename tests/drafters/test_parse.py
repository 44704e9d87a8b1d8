"""What holds for every drafter without training: the text is the target's own, and its state follows the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.decoding.generate import Speculation, generate, generate_batch
from spechead.decoding.tree import Dynamic, Plan, chain
from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.parse import load_drafter, parse_drafter
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged
from spechead.errors import UserError
from spechead.target.loading import DTYPES
from spechead.target.model import Target
from tests.helpers.drafters import HALF, NOTHING, TREE, prompt_of
from tests.helpers.targets import FAMILIES, make_target

KINDS: dict[str, Callable[[Target], Drafter]] = {
    "prompt_lookup": lambda target: PromptLookup(),
    "draft_model": lambda target: DraftModel(target, make_target(seed=1)),
    "self": lambda target: SelfSpeculative(target, HALF),
    "staged": lambda target: Staged(SelfSpeculative(target, HALF), PromptLookup(2, "latest")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_targets_own_in_every_family(family: str) -> None:
    target = make_target(family)
    prompt = prompt_of() + prompt_of(4)  # the lookup finds something; the text crosses the sliding windows
    plain = generate(target, prompt, max_new_tokens=12).tokens
    drafters: list[tuple[Drafter, Plan]] = [
        (PromptLookup(), chain(3)),
        (SelfSpeculative(target, HALF), chain(3)),
        (SelfSpeculative(target, HALF), TREE),
        (Staged(SelfSpeculative(target, HALF), PromptLookup()), chain(3)),
    ]
    for drafter, plan in drafters:
        found = generate(target, prompt, drafter, speculation=Speculation(plan), max_new_tokens=12)
        assert found.tokens == plain, (type(drafter).__name__, str(plan))


@pytest.mark.parametrize("kind", KINDS)
def test_any_plan_any_prompt_one_or_many(target: Target, kind: str) -> None:
    drafter = KINDS[kind](target)
    prompts = [[5], prompt_of(7), prompt_of(3) * 3]
    plain = [generate(target, prompt, max_new_tokens=10).tokens for prompt in prompts]
    for plan in (chain(5, floor=0.2), TREE, Dynamic(6, 3, 2)):
        speculation = Speculation(plan)
        alone = [generate(target, p, drafter, speculation=speculation, max_new_tokens=10).tokens for p in prompts]
        assert alone == plain, str(plan)
        together = generate_batch(target, prompts, drafter, speculation=speculation, max_new_tokens=10)
        assert [row.tokens for row in together] == plain, str(plan)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_state_follows_the_text_whatever_was_accepted(target: Target, kind: str, data: st.DataObject) -> None:
    drafter = KINDS[kind](target)
    text = torch.tensor(data.draw(st.lists(st.integers(3, 12), min_size=6, max_size=24)))
    cuts = sorted(data.draw(st.sets(st.integers(2, len(text) - 1), max_size=5)))
    prompt = text[: data.draw(st.integers(1, (cuts or [len(text)])[0] - 1))]
    state, before = drafter.new_state(prompt), 1
    for cut in cuts:  # a proposal each, of which the text then takes as much or as little as it happens to
        drafter.propose(state, text[before:cut], NOTHING, TREE)
        before = cut
    tree = drafter.propose(state, text[before:], NOTHING, TREE)
    anew = drafter.propose(drafter.new_state(text[:-1]), text[1:], NOTHING, TREE)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == (anew.tokens.tolist(), anew.parents.tolist())
    assert tree.tokens[0] == text[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_last_position_is_reached(target: Target, kind: str) -> None:
    prompt = prompt_of(243)
    plain = generate(target, prompt, max_new_tokens=99)
    assert len(plain.tokens) == 13
    assert generate(target, prompt, KINDS[kind](target), max_new_tokens=99).tokens == plain.tokens


# ------------------------------------------------------------------------------------------------ named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft+model")
    draft = make_target(seed=1)
    draft.model.save_pretrained(path)
    draft.tokenizer.save_pretrained(path)
    return path


def test_names_of_drafters(target: Target, folder: Path) -> None:
    state = PromptLookup().new_state(torch.tensor([7]))
    lookup = load_drafter("prompt_lookup:match=latest,ngram=2", target)
    assert isinstance(lookup, PromptLookup)
    lookup.propose(state, torch.tensor([8, 7, 9, 7]), NOTHING, chain(1))
    assert max(map(len, state.following)) == 2
    assert isinstance(load_drafter("prompt_lookup", target), PromptLookup)

    itself = load_drafter("self:0-2,4,6", target)
    assert isinstance(itself, SelfSpeculative)
    assert list(itself.draft._blocks) == [target._blocks[i] for i in (0, 1, 2, 4, 6)]

    staged = load_drafter(f"staged:draft_model:{folder}+prompt_lookup:ngram=2", target)
    assert isinstance(staged, Staged) and isinstance(staged.tiny, PromptLookup)
    assert staged.middle.draft.n_layers == 7
    staged = load_drafter("staged:self:0-3+self:0-1", target)
    assert isinstance(staged, Staged) and isinstance(staged.tiny, SelfSpeculative)
    assert staged.tiny.target is staged.middle.draft and staged.tiny.draft.n_layers == 2


def test_a_draft_model_is_loaded_in_the_targets_way(folder: Path) -> None:
    for options in ({"dtype": "bfloat16"}, {"pack": False}, {}):
        target = Target.load(str(folder), device="cpu", **options)
        target.base = "another"
        for dtype in ("float32", "bfloat16", "auto"):
            drafter = load_drafter(f"draft_model:{folder}", target, dtype=dtype)
            assert isinstance(drafter, DraftModel)
            assert drafter.draft is not target
            assert (drafter.draft.device, drafter.draft.packed) == (target.device, target.packed)
            assert drafter.draft.dtype == DTYPES[target.drafting_dtype(dtype)]


def test_what_drafts_is_bfloat16_where_that_is_fast(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (True, False):
        monkeypatch.setattr("spechead.target.loading.native_bfloat16", lambda device, fast=fast: fast)
        assert target.drafting_dtype("auto") == ("bfloat16" if fast else "float32")
        assert target.drafting_dtype("float16") == "float16"


def test_a_targets_own_name_is_the_target_itself(folder: Path) -> None:
    target = Target.load(str(folder), device="cpu", pack=False)
    for dtype in ("auto", "float32"):
        drafter = load_drafter(f"draft_model:{folder}", target, dtype=dtype)
        assert isinstance(drafter, DraftModel) and drafter.draft is target
    other = load_drafter(f"draft_model:{folder}", target, dtype="bfloat16")
    assert isinstance(other, DraftModel) and other.draft.dtype == torch.bfloat16
    target.base = "own"
    staged = load_drafter("staged:self:0-2+draft_model:own", target)
    assert isinstance(staged, Staged) and isinstance(staged.tiny, DraftModel)
    assert staged.tiny.draft is target, "and not the middle, which goes by the same name"


def test_code_of_a_draft_model_runs_where_it_is_allowed(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []

    def load(name: str, *, trust_remote_code: bool, **_: object) -> Target:
        allowed.append(trust_remote_code)
        return make_target(seed=1)

    monkeypatch.setattr(Target, "load", load)
    for trust in (False, True):
        load_drafter("draft_model:code", target, trust_remote_code=trust)
        load_drafter("staged:self:0-2+draft_model:code", target, trust_remote_code=trust)
    assert allowed == [False, False, True, True]


@pytest.mark.parametrize(
    "text,reason",
    [
        ("", "option drafter: '' is not a drafter; use prompt_lookup"),
        ("eagle", "option drafter: 'eagle' is not a drafter"),
        ("prompt_lookup:", "is not a drafter"),
        ("prompt_lookup:ngram=two", "is not a drafter"),
        ("prompt_lookup:ngram=0", "ngram of prompt_lookup must be from 1 to 16, got 0"),
        ("prompt_lookup:match=best", "match of prompt_lookup must be first or latest, got 'best'"),
        ("draft_model:", "is not a drafter"),
        ("draft_model:nowhere", "draft model: target 'nowhere' cannot be loaded"),
        ("self:", "is not a drafter"),
        ("self:0,1-", "is not a drafter"),
        ("self:0-7", "'tiny-llama' has layers 0-6, not 7"),
        ("self:3-1,5", "layers of 'self:3-1,5' must ascend"),
        ("self:5,2", "layers of 'self:5,2' must ascend"),
        ("self:0-3,3", "layers of 'self:0-3,3' must ascend"),
        ("staged:prompt_lookup", "'' is not a drafter"),
        ("staged:prompt_lookup+prompt_lookup", "'prompt_lookup' in .* is not a model"),
        ("staged:self:0-3+eagle", "'eagle' is not a drafter"),
        ("staged:self:0-3", "'' is not a drafter"),
    ],
)
def test_mistakes_are_named(target: Target, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_drafter(text, target)
    if "has layers" not in reason and "cannot be loaded" not in reason:  # the rest needs no target
        with pytest.raises(UserError, match=reason):
            parse_drafter(text)
