"""Decoder steps computed twice (gradient checkpointing): the same loss and gradients, less kept for backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spechead.data.dataset import Sample, collate
from spechead.heads import HEADS, Head
from spechead.heads.unrolled import UnrolledHead
from tests.helpers.targets import make_target

UNROLLED = [kind for kind, head in HEADS.items() if issubclass(head, UnrolledHead)]
CASES: list[tuple[str, dict[str, object]]] = [
    *((kind, {"steps": 4}) for kind in UNROLLED),
    ("eagle", {"steps": 3, "n_layers": 2, "detach_steps": True}),
]


def loss_of(kind: str, options: dict[str, object], recompute: bool) -> tuple[Head, Tensor, int]:
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
    kind: str, options: dict[str, object], rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spechead.heads.attention._WEIGHTS_AT_ONCE", rows_at_once)
    plain, loss, kept = loss_of(kind, options, recompute=False)
    twice, same, kept_twice = loss_of(kind, options, recompute=True)
    assert float(loss.detach()) == float(same.detach())
    loss.backward()
    same.backward()
    for (name, a), b in zip(plain.named_parameters(), twice.parameters(), strict=True):
        assert a.grad is not None and torch.equal(a.grad, b.grad), name
    assert kept_twice < 0.8 * kept
