"""The attention patterns of unrolled training and of drafting."""

from __future__ import annotations

import pytest
import torch

from spechead.data.dataset import collate
from spechead.heads import attention
from spechead.heads.attention import CachedAttention, UnrolledAttention, causal_after
from spechead.target.cache import KVBuffer
from spechead.target.model import Target
from tests.helpers.heads import UNROLLED, kept_for_backward, make_head, sample, step


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
            assert one is not None and other is not None
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
    assert max(kept[1:]) < kept[0] / 4  # what is left is the mask, and no longer one for each head and step


def test_cached_rows_are_attended_to_as_in_one_pass() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    rows = KVBuffer()
    whole = CachedAttention(KVBuffer(), causal_after(0, 6, query.device))(query, key, value)
    parts = []
    for past, end in ((0, 2), (2, 3), (3, 6)):
        attend = CachedAttention(rows, causal_after(past, end - past, query.device))
        parts.append(attend(query[:, :, past:end], key[:, :, past:end], value[:, :, past:end]))
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-6)


def test_padding_and_other_documents_are_not_seen() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 5, 4) for _ in range(3))
    seen = UnrolledAttention(torch.tensor([[0, 0, 1, 1, -1]]))(query, key, value)
    alone = UnrolledAttention(torch.tensor([[0, 0]]))(*(x[:, :, 2:4] for x in (query, key, value)))
    assert torch.allclose(seen[:, :, 2:4], alone, atol=1e-6)
    assert torch.allclose(seen[:, :, 4], value[:, :, 4])  # padding sees itself alone
