"""Hydra: what each head reads, one law in training and in drafting, the prefix layer's memory, and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead.data.dataset import Batch, Sample, collate
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Dynamic, Static, chain
from spechead.errors import UserError
from spechead.heads import hydra
from spechead.heads.attention import UnrolledAttention
from spechead.heads.base import ahead
from spechead.heads.hydra import Hydra, HydraConfig
from spechead.target.cache import KVBuffer
from spechead.target.model import Target, TargetOutput
from spechead.target.rotary import rope_theta
from tests.helpers.heads import PLANS, TREE, fit, one_row, sample, step
from tests.helpers.targets import make_target

PLUS_PLUS: dict[str, Any] = {"norm_embeddings": False, "n_layers": 4, "prefix": True, "loss": "soft_ce", "dropout": 0.2}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"norm_embeddings": False},
    "plus-plus": PLUS_PLUS,
    "reduced": {"prefix": True, "draft_vocab_size": 48},
    "shared": {"output": "shared", "n_layers": 2},
}


def make_head(target: Target, *, random: bool = False, **options: Any) -> Hydra:
    torch.manual_seed(0)
    head = Hydra(HydraConfig(**options), target)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size) * 2)  # every other token, so that the map matters
    head.init_from_target()
    if random:
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return head


def embedded(head: Hydra, ids: Tensor) -> Tensor:
    """[n, H], each row of mean square 1 but for the options that say otherwise."""
    rows = head.target.embed(ids)
    return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() if head.config.norm_embeddings else rows


def everywhere(text: Sample) -> Batch:
    """The text with every token supervised."""
    return collate([Sample(text.ids, torch.ones_like(text.supervised), 0)], 64)


def watch(head: Hydra, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Tensor, Tensor]]:
    """What each head read last, and the logits that it made of it."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for k, stack in enumerate(head.heads):

        def spy(inputs: Tensor, drop: Any, k: int = k, real: Any = stack.forward) -> Tensor:
            state = real(inputs, drop)
            seen[k] = inputs.detach(), head.output(state, k).detach()
            return state

        monkeypatch.setattr(stack, "forward", spy)
    return seen


def trained(head: Hydra, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Tensor]:
    """(k, row) -> head k's log-probabilities [D] at a row of training's batch."""
    with monkeypatch.context() as patch:
        seen = watch(head, patch)
        step(head, batch)

    def at(k: int, row: int) -> Tensor:
        ids, supervised = ahead(batch, 2 + k)
        rows = (supervised & head.to_draft(ids)[1])[0].nonzero()[:, 0].tolist()
        return seen[k][1][rows.index(row)].log_softmax(-1)

    return at


# ------------------------------------------------------------------------------------------------ what a head reads


def test_what_each_head_reads_by_hand(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(target, n_heads=3, norm_embeddings=False)
    size = target.hidden_size
    monkeypatch.setattr(target, "embed", lambda ids: ids[..., None].expand(*ids.shape, size).float())
    batch = one_row([0, 0, 0, 1, 1, 1])  # tokens 10..15
    hidden = torch.arange(6.0)[None, :, None].expand(1, 6, size)  # row t is full of t
    seen = watch(head, monkeypatch)
    head.training_step(batch, TargetOutput(hidden, hidden[..., :0]))
    read = {k: inputs[:, ::size].tolist() for k, (inputs, _) in seen.items()}
    assert read[0] == [[1, 12], [2, 13], [3, 14]]  # the drafts are 13, 14, 15
    assert read[1] == [[0, 11, 12], [1, 12, 13], [2, 13, 14]]
    assert read[2] == [[0, 11, 12, 13], [1, 12, 13, 14]]  # the drafts are 14, 15


@pytest.mark.parametrize(("family", "output"), [("llama", "own"), ("llama", "shared"), ("granite", "shared")])
def test_a_fresh_head_repeats_the_targets_next_token(family: str, output: str) -> None:
    target = make_target(family)
    head = make_head(target, n_layers=3, output=output)
    out = target.forward(sample(target).ids[None])
    for k in range(4):
        inputs = torch.cat([out.hidden, torch.randn(*out.hidden.shape[:2], (k + 1) * target.hidden_size)], -1)
        logits = head.head_logits(inputs, k)
        assert torch.allclose(logits, target.logits(out.hidden), atol=1e-5)
        with torch.no_grad():  # as in drafting
            assert torch.allclose(logits, head.head_logits(inputs, k), atol=1e-5)


def test_nothing_is_shared(target: Target) -> None:
    head = make_head(target, n_layers=3, prefix=True)
    storage = [p.data_ptr() for p in head.parameters()]
    prefix = 2 + 4 + 3
    assert len(set(storage)) == len(storage) == 4 * (3 * 2 + 1 + 1) + prefix
    held = {p.data_ptr() for p in target.model.parameters()}
    assert not held & set(storage)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2"])
def test_a_prefix_layer_starts_near_the_identity(family: str) -> None:
    target = make_target(family)
    head = make_head(target, prefix=True)
    assert head.prefix is not None
    batch = collate([sample(target)], 64)
    hidden = target.forward(batch.ids).hidden
    with torch.no_grad():
        after = head.prefix(hidden, batch.positions, UnrolledAttention(batch.document))
    assert 0 < float((after - hidden).norm() / hidden.norm()) < 0.5


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("loss", ["hard_ce", "soft_ce"])
def test_loss_row_by_row(target: Target, loss: str) -> None:
    head = make_head(target, random=True, n_heads=3, loss=loss, decay=0.5, draft_vocab_size=48)
    text = sample(target)
    batch = collate([text], 64)
    out = target.forward(batch.ids)
    teacher = target.logits(out.hidden, head.draft_ids())[0].softmax(-1)  # [T, D]
    expected = 0.0
    for k in range(3):
        for row in range(len(text.ids) - 2 - k):
            label = text.ids[row + 2 + k]
            if not text.supervised[row + 2 + k] or not head.t2d[label]:
                continue
            read = [out.hidden[0, row], *embedded(head, text.ids[row + 1 : row + 2 + k])]
            logp = head.head_logits(torch.cat(read), k).detach().log_softmax(-1)
            q = teacher[row + 1 + k] if loss == "soft_ce" else torch.eye(48)[label // 2]
            expected -= 0.5**k * float((q * logp).sum())
    result = step(head, batch)
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert result.hits.correct.shape == (3, *batch.ids.shape)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant: str, target: Target) -> None:
    head = make_head(target, **VARIANTS[variant])
    step(head, collate([sample(target)], 64)).loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_hydra_plus_plus_learns(target: Target) -> None:
    head = make_head(target, **PLUS_PLUS | {"dropout": 0.1})
    batch = collate([sample(target)], 64)
    before = float(step(head, batch).loss.detach())
    fit(head, batch, 60, lr=3e-3)
    head.eval()
    assert float(step(head, batch).loss.detach()) < 0.9 * before


def test_dropout_is_in_training_alone_and_follows_the_seed(target: Target) -> None:
    head = make_head(target, **PLUS_PLUS)
    text = sample(target)
    batch = collate([text], 64)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(step(head, batch).loss.detach())

    assert loss(1) == loss(1) != loss(2)
    fresh, out = text.ids[1:], target.forward(text.ids[None, :-1])
    drafts = [head.propose(head.new_state(text.ids), fresh, out, PLANS[2]).tokens.tolist()]
    head.eval()
    assert loss(1) == loss(2)
    head.config.dropout = 0.0
    assert loss(1) == float(step(head.train(), batch).loss.detach())
    drafts.append(head.propose(head.new_state(text.ids), fresh, out, PLANS[2]).tokens.tolist())
    assert drafts[0] == drafts[1]


def test_dropout_zeroes_its_share_and_differs_between_conversations() -> None:
    ones, noise, then = torch.ones(200, 50), [], []
    for row, share in ((3, 0.2), (3, 0.2), (4, 0.2), (3, 0.6)):
        batch = one_row([1] * (2 + row))
        batch.rows = [row]
        torch.manual_seed(7)
        noise.append(hydra._Dropout(share, batch)(ones))
        then.append(float(torch.rand(())))  # the run's random state has moved on as far for each batch
    assert torch.equal(noise[0], noise[1]) and not torch.equal(noise[0], noise[2])
    assert noise[0].unique().tolist() == [0.0, 1.25] and noise[3].unique().tolist() == [0.0, 2.5]
    assert float(noise[0].mean()) == pytest.approx(1, abs=0.03)
    assert float(noise[3].mean()) == pytest.approx(1, abs=0.06)
    assert len(set(then)) == 1


# ------------------------------------------------------------------------------------------------ drafting


def drafted(head: Hydra, text: Sample, out: TargetOutput, row: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The laws [D] of the four drafts of a pass behind `row`, whose tokens are the text's own.

    Half of the rows come with a call before, so that the rest stands on what the state remembers.
    """
    laws: list[Tensor] = []

    def own_text(_: object, root: Tensor, first: Tensor, __: object, deepen: Any, *rest: object) -> None:
        assert int(root) == text.ids[row + 1]
        laws.append(first[0])
        for s in range(3):
            token, parent = text.ids[row + 2 + s : row + 3 + s], torch.tensor([s - 1])
            laws.append(deepen(token, parent, torch.ones(1, s + 1, dtype=torch.bool))[0])

    state, half = head.new_state(text.ids), row // 2
    head.propose(state, text.ids[1 : half + 1], out.rows(torch.arange(half)), chain(1))
    with monkeypatch.context() as patch:
        patch.setattr(hydra, "grow", own_text)
        head.propose(state, text.ids[half + 1 : row + 2], out.rows(torch.arange(half, row + 1)), chain(4))
    return laws


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_drafting(variant: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(target, random=True, **VARIANTS[variant] | {"dropout": 0.0})
    text = sample(target)
    at = trained(head, everywhere(text), monkeypatch)
    out = target.forward(text.ids[None])
    compared = 0
    for row in (2, 3, 9, 15):
        for k, logp in enumerate(drafted(head, text, out, row, monkeypatch)):
            if bool(head.to_draft(text.ids[row + 2 + k])[1]):  # else training leaves the row out
                assert torch.allclose(logp, at(k, row), atol=1e-5), (row, k)
                compared += 1
    assert compared == 16 or (head.reduced and compared > 3)


def along(head: Hydra, last: Tensor, tokens: list[int]) -> Tensor:
    """The law [D] of the draft behind `tokens`, the root first, read from the state [H] of the row before."""
    inputs = torch.cat([last, *embedded(head, torch.tensor(tokens))])
    return head.head_logits(inputs, len(tokens) - 1).log_softmax(-1)


@pytest.mark.parametrize("plan", [TREE, Dynamic(nodes=14, depth=4, topk=4), Static(((2,), (0,), (0, 3), (2, 1), (1,)))])
@pytest.mark.parametrize("reduced", [0, 48])
def test_each_node_is_drafted_from_its_own_path(plan: Any, reduced: int, target: Target) -> None:
    head = make_head(target, random=True, draft_vocab_size=reduced)
    text = sample(target)
    out = target.forward(text.ids[None, :-1])
    tree = head.propose(head.new_state(text.ids), text.ids[1:], out, plan)
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    ids = torch.arange(target.vocab_size) if not reduced else head.draft_ids()
    assert ids is not None and len(tree) > 4
    for path in paths[1:]:
        ranked = ids[along(head, out.hidden[0, -1], path[:-1]).argsort(descending=True)].tolist()
        assert path[-1] in ranked[:4], path
    if isinstance(plan, Static):
        for node, choice in enumerate(plan.choices, start=1):
            ranked = ids[along(head, out.hidden[0, -1], paths[node][:-1]).argsort(descending=True)].tolist()
            assert paths[node][-1] == ranked[choice[-1]], choice


def test_sampled_drafts_have_the_distribution_of_their_path(target: Target) -> None:
    head = make_head(target, random=True, draft_vocab_size=48)
    text = sample(target)
    out = target.forward(text.ids[None, :-1])
    drawing = Drawing(0.7, SeededSource(5))
    tree = head.propose(head.new_state(text.ids), text.ids[1:], out, TREE, drawing)
    assert tree.drawn_from is not None
    ids = head.draft_ids()
    assert ids is not None
    for node, path in {0: [0], 1: [0, 1], 2: [0, 2], 4: [0, 1, 4]}.items():  # the nodes that have children
        law = (along(head, out.hidden[0, -1], tree.tokens[path].tolist()) / 0.7).softmax(-1)
        assert torch.allclose(tree.drawn_from[node, ids], law, atol=1e-5), node
        assert float(tree.drawn_from[node].sum()) == pytest.approx(1, abs=1e-5)


def test_drafts_are_no_deeper_than_there_are_heads(target: Target) -> None:
    head = make_head(target, n_heads=2)
    text = sample(target)
    out = target.forward(text.ids[None, :-1])
    assert int(head.propose(head.new_state(text.ids), text.ids[1:], out, chain(5)).depths.max()) == 2
    assert str(head.tree) == "chain:2" and head.depths == 2


def test_the_prefix_remembers_true_states_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(target, random=True, prefix=True)
    prompt = sample(target).ids[:8].tolist()
    states: list[KVBuffer] = []
    real = head.new_state

    def remember(ids: Tensor) -> KVBuffer:
        state = real(ids)
        assert state is not None
        states.append(state)
        return state

    monkeypatch.setattr(head, "new_state", remember)
    text = generate(target, prompt, head, speculation=Speculation(PLANS[2]), max_new_tokens=20).tokens
    whole = torch.tensor(prompt + text)
    count = states[0].length
    assert count > len(prompt)
    fresh = remember(whole)
    head.propose(fresh, whole[1 : count + 1], target.forward(whole[None]).rows(torch.arange(count)), chain(1))
    assert states[0]._keys is not None and fresh._keys is not None
    assert states[0]._values is not None and fresh._values is not None
    assert torch.allclose(states[0]._keys[:, :, :count], fresh._keys[:, :, :count], atol=1e-5)
    assert torch.allclose(states[0]._values[:, :, :count], fresh._values[:, :, :count], atol=1e-5)


# ------------------------------------------------------------------------------------------------ options


def test_the_prefix_has_the_targets_shape_unless_given() -> None:
    target = make_target("qwen3-wide-heads")
    config = make_head(target, prefix=True).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.intermediate_size, config.rope_theta) == (48, rope_theta(target.config))
    own = make_head(target, prefix=True, head_dim=8, num_key_value_heads=1, intermediate_size=20)
    assert own.prefix is not None and own.prefix.self_attn.k_proj.weight.shape == (8, 32)
    assert own.prefix.mlp.up_proj.weight.shape == (20, 32)
    assert math.isfinite(float(step(own, collate([sample(target)], 64)).loss.detach()))


@pytest.mark.parametrize(
    "options",
    [{"output": "both"}, {"loss": "mse"}, {"n_heads": 0}, {"n_layers": 0}, {"dropout": 1.0}, {"hidden_size": 8}],
)
def test_bad_options_are_named(options: dict[str, Any], target: Target) -> None:
    with pytest.raises(UserError, match=r"head\.options.*" + next(iter(options))):
        make_head(target, **options)
