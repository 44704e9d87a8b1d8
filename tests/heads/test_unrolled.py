"""Autoregressive heads: training equals drafting, the cache has true rows, and recomputed steps change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead.data.dataset import Sample, collate
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import chain
from spechead.heads import HEADS, Head
from spechead.heads.unrolled import HeadCache, UnrolledHead
from spechead.target.model import Target
from tests.helpers.heads import PLANS, UNROLLED, UNROLLED_VARIANTS, check_unrolled, make_head, sample
from tests.helpers.targets import make_target

CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"steps": 4}) for kind in UNROLLED),
    ("eagle", {"steps": 3, "n_layers": 2, "detach_steps": True}),
]


def loss_of(kind: str, options: dict[str, Any], recompute: bool) -> tuple[Head, Tensor, int]:
    """A head, its loss on two conversations, and the bytes that autograd keeps for backward.

    What starts a step that is computed twice is kept, too, and not counted: hidden states, keys and values.
    """
    target = make_target("llama")
    torch.manual_seed(0)
    head = HEADS[kind](HEADS[kind].Config(draft_vocab_size=32, **options), target)
    head.set_vocabulary(torch.arange(32) * 3)
    head.recompute = recompute
    draw = torch.Generator().manual_seed(1)
    samples = [
        Sample(torch.randint(3, 97, (n,), generator=draw), torch.arange(n) >= 4, i) for i, n in enumerate((30, 20))
    ]
    batch = collate(samples, 60)
    same = batch.document[:, :, None] == batch.document[:, None, :]
    out = target.forward(batch.ids, taps=head.taps, positions=batch.positions, visible=same.tril())
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = head.training_step(batch, out).loss
    return head, loss, sum(kept.values())


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("rows_at_once", [1 << 24, 500])
def test_steps_computed_twice_give_the_same_gradients_from_less_memory(
    kind: str, options: dict[str, Any], rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spechead.heads.attention._WEIGHTS_AT_ONCE", rows_at_once)
    plain, loss, kept = loss_of(kind, options, recompute=False)
    twice, same, kept_twice = loss_of(kind, options, recompute=True)
    assert float(loss.detach()) == float(same.detach())
    loss.backward()
    same.backward()
    for (name, a), b in zip(plain.named_parameters(), twice.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name
    assert kept_twice < 0.8 * kept


@pytest.mark.parametrize("kind", UNROLLED)
def test_unrolled_steps_equal_real_drafting(kind: str, target: Target) -> None:
    check_unrolled(make_head(kind, target, seed=5), target)


@pytest.mark.parametrize("variant", UNROLLED_VARIANTS)
def test_unrolled_steps_of_a_variant_equal_real_drafting(variant: str, make_variant: Callable[[str], Head]) -> None:
    head = make_variant(variant)
    check_unrolled(head, head.target)


@pytest.mark.parametrize("kind", UNROLLED)
def test_draft_cache_is_rebuilt_from_true_features(kind: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(kind, target)
    prompt = sample(target).ids[:8].tolist()
    states: list[HeadCache] = []
    real = head.new_state

    def remember(ids: Tensor) -> HeadCache:
        states.append(real(ids))
        return states[-1]

    monkeypatch.setattr(head, "new_state", remember)
    text = generate(target, prompt, head, speculation=Speculation(PLANS[2]), max_new_tokens=20).tokens
    state = states[0]
    whole = torch.tensor(prompt + text)
    out = target.forward(whole[None], taps=head.taps)
    fresh = head.new_state(whole)
    count = state.committed
    head.propose(fresh, whole[1 : count + 1], out.rows(torch.arange(count)), chain(1))
    assert isinstance(head, UnrolledHead) and len(state.rows) == len(fresh.rows) == head.n_layers
    for kept, made in zip(state.rows, fresh.rows, strict=True):
        for one, two in ((kept._keys, made._keys), (kept._values, made._values)):
            assert one is not None and two is not None
            assert torch.allclose(one[:, :, :count], two[:, :, :count], atol=1e-5)
