"""Every head of HEADS on tiny targets: alignment, training equals drafting, overfitting, losslessness, saving."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.data.dataset import Batch, collate
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.heads import HEADS, Head, attention
from spechead.heads.base import ahead
from spechead.heads.files import head_target, load_head, save_head
from spechead.heads.medusa import Medusa
from spechead.options import check_ranges
from spechead.target.cache import KVBuffer
from spechead.target.model import Target
from tests.helpers import targets
from tests.helpers.heads import (
    PLANS,
    UNROLLED,
    UNROLLED_VARIANTS,
    VARIANTS,
    check_unrolled,
    fit,
    kept_for_backward,
    make_head,
    one_row,
    sample,
    step,
)
from tests.helpers.targets import FAMILIES, make_target


@pytest.mark.parametrize("kind", HEADS)
def test_a_loaded_vocabulary_is_the_one_that_computes(kind: str, target: Target) -> None:
    """Also where another one was counted, and looked at, before: a resumed run on data that would give it."""
    head, other = (make_head(kind, target, draft_vocab_size=8) for _ in range(2))
    ids = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89])
    other.set_vocabulary(ids)
    assert head.draft_ids().tolist() != ids.tolist() and not head.to_draft(ids)[1].all()
    head.load_state_dict(other.state_dict())
    assert head.draft_ids().tolist() == ids.tolist()
    assert head.to_draft(ids)[0].tolist() == list(range(8)) and head.to_draft(ids)[1].all()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@torch.no_grad()
def test_validation_judges_as_many_drafts_as_the_tree_asks_for(kind: str, target: Target) -> None:
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


def test_medusa_blocks_share_nothing(target: Target) -> None:
    head = make_head("medusa", target, n_layers=3)
    storage = [p.data_ptr() for p in head.parameters()]
    assert len(set(storage)) == len(storage) == 4 * (3 * 2 + 1)


def test_a_fresh_medusa_head_repeats_the_targets_next_token(target: Target) -> None:
    for output in ("own", "shared"):
        head = make_head("medusa", target, output=output, draft_vocab_size=0)
        assert isinstance(head, Medusa)
        out = target.forward(sample(target).ids[None])
        for k in range(4):
            assert torch.allclose(head.head_logits(out.hidden, k), target.logits(out.hidden), atol=1e-5)


# ------------------------------------------------------------------------------------------------ training = drafting


@pytest.mark.parametrize("kind", UNROLLED)
def test_unrolled_steps_equal_real_drafting(kind: str, target: Target) -> None:
    check_unrolled(make_head(kind, target, seed=5), target)


@pytest.mark.parametrize("variant", UNROLLED_VARIANTS)
def test_unrolled_steps_of_a_variant_equal_real_drafting(variant: str, make_variant: Callable[[str], Head]) -> None:
    head = make_variant(variant)
    check_unrolled(head, head.target)


@pytest.mark.parametrize("kind", UNROLLED)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_a_few_rows_at_a_time_changes_nothing(
    kind: str, packed: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [sample(target, 17), sample(target, 6, seed=4)]
    batch = collate(texts, 64 if packed else 25)
    assert batch.ids.shape[0] == (1 if packed else 2)
    found, kept = [], []
    five_rows = 5 * 4 * batch.ids.numel()  # of 4 heads
    for at_once, recompute in ((attention._WEIGHTS_AT_ONCE, False), (five_rows, False), (five_rows, True)):
        monkeypatch.setattr(attention, "_WEIGHTS_AT_ONCE", at_once)
        head = make_head(kind, target)
        head.recompute = recompute
        with kept_for_backward() as sizes:
            loss = step(head, batch).loss
        loss.backward()
        found.append((float(loss.detach()), [parameter.grad for parameter in head.parameters()]))
        width = batch.ids.shape[1]  # what is kept of the weights has a column for each row, and some for drafts
        kept.append(sum(shape.numel() for shape in sizes if len(shape) == 4 and width <= shape[-1] <= width + 4))
    (plain, gradients), *chunked = found
    for again, others in chunked:
        assert again == pytest.approx(plain, rel=1e-6)
        for one, other in zip(gradients, others, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
    assert max(kept[1:]) < kept[0] / 4  # what is left is the mask, and no longer one for each head and step


@pytest.mark.parametrize("kind", UNROLLED)
def test_draft_cache_is_rebuilt_from_true_features(kind: str, target: Target) -> None:
    head = make_head(kind, target)
    prompt = sample(target).ids[:8].tolist()
    states = []
    real = head.new_state

    def remember(ids: torch.Tensor) -> object:
        states.append(real(ids))
        return states[-1]

    head.new_state = remember  # type: ignore[method-assign]
    text = generate(target, prompt, head, speculation=Speculation(PLANS[2]), max_new_tokens=20).tokens
    state = states[0]
    whole = torch.tensor(prompt + text)
    out = target.forward(whole[None], taps=head.taps)
    fresh = head.new_state(whole)
    count = state.committed
    head.propose(fresh, whole[1 : count + 1], out.rows(torch.arange(count)), chain(1))
    assert len(state.rows) == len(fresh.rows) == head.n_layers
    for kept, made in zip(state.rows, fresh.rows, strict=True):
        assert torch.allclose(kept._keys[:, :, :count], made._keys[:, :, :count], atol=1e-5)
        assert torch.allclose(kept._values[:, :, :count], made._values[:, :, :count], atol=1e-5)


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
    peaked = {"eagle": {"topk_weight": 0.0}, "eagle3": {"loss": "hard_ce"}}
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
def test_saved_heads_come_back(kind: str, target: Target, tmp_path: Path) -> None:
    head = make_head(kind, target)
    head.tree = PLANS[2]
    save_head(head, tmp_path / "head", {"note": "x"})
    again = load_head(tmp_path / "head", target, dtype=torch.float32)
    assert str(again.tree) == str(PLANS[2]) and head_target(tmp_path / "head") == target.name
    check_same(head, again)
    held = {p.data_ptr() for p in target.model.parameters()}
    assert not held & {t.data_ptr() for t in head.state_dict().values()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_variants_come_back(variant: str, make_variant: Callable[[str], Head], tmp_path: Path) -> None:
    head = make_variant(variant)
    save_head(head, tmp_path / "head", {})
    again = load_head(tmp_path / "head", head.target, dtype=torch.float32)
    assert again.config == head.config
    check_same(head, again)
    batch = collate([sample(head.target)], 64)
    assert float(step(again, batch).loss) == float(step(head.eval(), batch).loss.detach())


def check_same(head: Head, again: Head) -> None:
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_before_an_option_keep_their_meaning(kind: str, tmp_path: Path) -> None:
    """What a file does not name has its default; positions stay without scaling, on a scaled target too."""
    head = make_head(kind, make_target())
    save_head(head, tmp_path / "head", {})
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    for option in ("n_layers", "norm_output", "fc_norm", "step_weights", "rope_scaling", "loss"):
        if config["config"].get(option) == getattr(HEADS[kind].Config(), option, None):
            config["config"].pop(option, None)
    path.write_text(json.dumps(config))
    assert load_head(tmp_path / "head", head.target).config == head.config
    config["config"]["colour"] = "red"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"a {kind} head has no option colour"):
        load_head(tmp_path / "head", head.target)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_drafts_in_bfloat16_changes_no_text(kind: str, target: Target, tmp_path: Path) -> None:
    save_head(make_head(kind, target), tmp_path / "head", {})
    head = load_head(tmp_path / "head", target, dtype=torch.bfloat16)
    assert head.dtype == torch.bfloat16 != target.dtype
    prompt = sample(target, 2).ids.tolist()
    plain = generate(target, prompt, max_new_tokens=16).tokens
    for plan in PLANS:
        assert generate(target, prompt, head, speculation=Speculation(plan), max_new_tokens=16).tokens == plain


@pytest.mark.parametrize("kind", HEADS)
def test_damaged_heads_are_refused(kind: str, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_head(make_head(kind, target), folder, {})
    other = make_target(seed=9)
    with pytest.raises(UserError, match="was trained for target"):
        load_head(folder, other)
    load_head(folder, other, force=True)
    state = load_file(folder / "model.safetensors")
    first = next(iter(state))
    save_file({k: v for k, v in state.items() if k != first}, folder / "model.safetensors")
    with pytest.raises(UserError, match="missing tensors"):
        load_head(folder, target)
    save_file(state | {"stray": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="unexpected tensors"):
        load_head(folder, target)
    save_file(state | {first: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="wrong shape"):
        load_head(folder, target)
    weight = next(name for name, tensor in state.items() if tensor.is_floating_point())
    save_file(state | {weight: state[weight] * float("nan")}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{weight} holds numbers that are not finite"):
        load_head(folder, target)
    for change in ({"d2t": state["d2t"] + 90}, {"d2t": state["d2t"].float()}, {"t2d": ~state["t2d"]}):
        save_file(state | change, folder / "model.safetensors")
        with pytest.raises(UserError, match="no draft vocabulary of a target with 97 tokens"):
            load_head(folder, target)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot read"):
        load_head(folder, target)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not a spechead head"):
        load_head(folder, target)
    with pytest.raises(UserError, match="no head at"):
        load_head(tmp_path / "nowhere", target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "x"}, "target is 'x'"),
        ({"target": {}}, "target has no name"),
        ({"target": {"name": "x"}}, "target has no fingerprint"),
        ({"tree": None}, "tree is None"),
        ({"tree": "nope"}, "tree 'nope'"),
        ({"config": []}, r"config is \[\]"),
        ({"config": {"layers": "x"}}, "option head.options.layers"),
        ({"config": {"steps": "a"}}, "option head.options.steps"),
        ({"config": {"steps": 0}}, "option head.options.steps: must be at least 1"),
        ({"meta": None}, "meta is None"),
        ({"kind": []}, r"kind is \[\]"),
    ],
)
def test_an_edited_configuration_is_one_line_that_names_the_file(
    change: dict[str, object], message: str, target: Target, tmp_path: Path
) -> None:
    save_head(make_head("eagle3", target), tmp_path / "head", {})
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        load_head(tmp_path / "head", target, force=True)


def test_a_head_of_no_numbers_is_not_written(target: Target, tmp_path: Path) -> None:
    head = make_head("eagle3", target)
    torch.nn.init.constant_(head.norm.weight, float("inf"))
    with pytest.raises(UserError, match="is not written: norm.weight holds numbers that are not finite"):
        save_head(head, tmp_path / "head", {})
    assert not (tmp_path / "head").exists()


def test_the_default_taps_are_distinct_and_ascend_in_a_target_of_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for layers in range(1, 8):
        monkeypatch.setitem(targets.BASE, "num_hidden_layers", layers)
        found[layers] = make_head("eagle3", make_target()).taps
    assert found == {
        1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (1, 2, 3), 5: (2, 3, 4), 6: (3, 4, 5), 7: (2, 3, 4)
    }  # fmt: skip


def test_layers_are_checked(target: Target) -> None:
    for layers in ([1, 1, 2], [0, 3, 8], [-1, 2, 3]):
        with pytest.raises(UserError, match=r"head\.options\.layers"):
            make_head("eagle3", target, layers=layers)
    assert make_head("eagle3", target, layers=[1, 7]).taps == (1, 7)


@pytest.mark.parametrize("kind", HEADS)
def test_every_number_among_the_options_has_a_range(kind: str) -> None:
    hints = get_type_hints(HEADS[kind].Config, include_extras=True)
    assert [name for name, hint in hints.items() if hint in (int, float)] == []
    for name, hint in hints.items():
        if hasattr(hint, "__metadata__"):
            with pytest.raises(UserError, match=rf"option head\.options\.{name}: must be "):
                check_ranges(replace(HEADS[kind].Config(), **{name: -1}), "head.options.")
