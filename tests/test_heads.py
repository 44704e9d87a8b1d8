"""Every head of HEADS on tiny targets: alignment, training equals drafting, overfitting, losslessness, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, make_target
from safetensors.torch import load_file, save_file

from spechead.cache import Rows
from spechead.dataset import Batch, Sample, collate
from spechead.errors import UserError
from spechead.formats.native import head_target, load_head, save_head
from spechead.generate import Speculation, generate
from spechead.heads import HEADS, Head
from spechead.heads.base import ahead
from spechead.heads.medusa import Medusa
from spechead.heads.unrolled import UnrolledHead
from spechead.target import Target
from spechead.tree import Dynamic, Static, chain

OPTIONS: dict[str, dict[str, object]] = {
    "eagle": {"steps": 4, "draft_vocab_size": 48, "topk_weight": 1.0, "noise": 0.0},
    "eagle3": {"steps": 4, "draft_vocab_size": 48},
    "hydra": {"n_heads": 4, "n_layers": 2, "prefix": True, "draft_vocab_size": 48},
    "medusa": {"n_heads": 4, "draft_vocab_size": 48},
}
TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
PLANS = [chain(4), TREE, Dynamic(nodes=14, depth=4, topk=4)]
UNROLLED = [kind for kind, head in HEADS.items() if issubclass(head, UnrolledHead)]


def make_head(kind: str, target: Target, seed: int = 0, **options: object) -> Head:
    torch.manual_seed(seed)
    config = HEADS[kind].Config(**OPTIONS.get(kind, {}) | options)
    head = HEADS[kind](config, target)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size) * 2)  # every other token, so that the map matters
    head.init_from_target()
    return head


def sample(target: Target, length: int = 20, seed: int = 3) -> Sample:
    """The target's own greedy text behind a prompt of eight tokens, the answer supervised."""
    prompt = torch.randint(3, target.vocab_size, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = prompt + generate(target, prompt, max_new_tokens=length).tokens
    return Sample(torch.tensor(ids), torch.arange(len(ids)) >= 8, 0)


def step(head: Head, batch: Batch) -> tuple[torch.Tensor, object]:
    same = batch.document[:, :, None] == batch.document[:, None, :]
    out = head.target.forward(batch.ids, layers=head.layers, positions=batch.positions, visible=same.tril())
    return head.training_step(batch, out)


def fit(head: Head, batch: Batch, steps: int, lr: float = 1e-2) -> None:
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        loss, _ = step(head, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


# ------------------------------------------------------------------------------------------------ alignment


def one_row(supervised: list[int], document: list[int] | None = None) -> Batch:
    width = len(supervised)
    return Batch(
        torch.arange(10, 10 + width)[None],
        torch.tensor([supervised], dtype=torch.bool),
        torch.arange(width)[None],
        torch.tensor([document or [0] * width]),
        [0],
    )


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
    alone = sum(float(step(head, collate([text], 64))[0].detach()) for text in (one, two))
    packed = collate([one, two], 64)
    assert packed.ids.shape[0] == 1
    padded = collate([one, two], max(len(one.ids), len(two.ids)))
    assert padded.ids.shape[0] == 2
    assert float(step(head, packed)[0].detach()) == pytest.approx(alone, rel=1e-5)
    assert float(step(head, padded)[0].detach()) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_every_parameter_gets_a_gradient(kind: str, target: Target) -> None:
    head = make_head(kind, target)
    step(head, collate([sample(target)], 64))[0].backward()
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


def check_unrolled(head: Head, target: Target) -> None:
    """At step s and row t, training's logits are those of the s-th draft of a pass that starts behind row t."""
    assert isinstance(head, UnrolledHead)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    text = sample(target)
    batch = collate([text], 64)
    out = target.forward(batch.ids, layers=head.layers)
    unrolled = head.unroll(batch, head.start(out), head.config.steps)
    trained = [head._log_probabilities(hidden[0]) for hidden in unrolled]  # each [T, D]
    for row in (0, 3, 9, 15):
        state = head.new_state(text.ids)
        fresh = text.ids[1 : row + 2]
        drafted = []
        original = head._log_probabilities

        def spy(h: torch.Tensor, seen: list = drafted, real=original, row: int = row) -> torch.Tensor:
            seen.append(real(h)[0])
            forced = torch.full((1, head.draft_size), -50.0)  # draft the text's own next token, as training feeds it
            label = int(head.to_draft(text.ids[row + 1 + len(seen)])[0])
            forced[0, label] = 0.0
            return forced

        ids = text.ids
        inside = [bool(head.to_draft(ids[row + 2 + s])[1]) for s in range(head.config.steps)]
        head._log_probabilities = spy  # type: ignore[method-assign]
        try:
            head.propose(state, fresh, out.rows(torch.arange(row + 1)), chain(head.config.steps))
        finally:
            head._log_probabilities = original  # type: ignore[method-assign]
        for s, logp in enumerate(drafted):
            assert torch.allclose(logp, trained[s][row], atol=1e-5), (row, s)
            if not inside[s]:
                break  # a token outside the draft vocabulary cannot be drafted


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
    out = target.forward(whole[None], layers=head.layers)
    fresh = head.new_state(whole)
    count = state.committed
    head.propose(fresh, whole[1 : count + 1], out.rows(torch.arange(count)), chain(1))
    assert len(state.rows) == len(fresh.rows) == head.n_layers
    for kept, made in zip(state.rows, fresh.rows, strict=True):
        assert torch.allclose(kept._keys[:, :, :count], made._keys[:, :, :count], atol=1e-5)
        assert torch.allclose(kept._values[:, :, :count], made._values[:, :, :count], atol=1e-5)


def test_rows_keep_a_path() -> None:
    rows = Rows()
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
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    held = {p.data_ptr() for p in target.model.parameters()}
    assert not held & {t.data_ptr() for t in head.state_dict().values()}


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
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot read"):
        load_head(folder, target)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not a spechead head"):
        load_head(folder, target)
    with pytest.raises(UserError, match="no head at"):
        load_head(tmp_path / "nowhere", target)


def test_layers_are_checked(target: Target) -> None:
    for layers in ([1, 1, 2], [0, 3, 8], [-1, 2, 3]):
        with pytest.raises(UserError, match=r"head\.options\.layers"):
            make_head("eagle3", target, layers=layers)
    assert make_head("eagle3", target, layers=[1, 7]).layers == (1, 7)
