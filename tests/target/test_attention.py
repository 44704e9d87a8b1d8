"""The attention function of targets against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spechead.target.attention import grouped_attention, shared_group_attention


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None) -> Tensor:  # -> [B, Q, N, D]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_follows_the_formula(groups: int, softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, groups, 5, 8), torch.randn(2, groups, 5, 8)
    mask = torch.rand(2, 1, 3, 5) > 0.4
    mask[..., 0] = True
    expected = by_formula(q, k, v, mask, softcap)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, additive):
        found, weights = shared_group_attention(nn.Module(), q, k, v, given, softcap=softcap)
        assert torch.allclose(found, expected, atol=1e-5) and weights is None


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_several_queries_without_a_mask_are_causal(softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    expected = by_formula(q, k, v, torch.ones(5, 5, dtype=torch.bool).tril(), softcap)
    found, _ = shared_group_attention(nn.Module(), q, k, v, None, softcap=softcap)
    assert torch.allclose(found, expected, atol=1e-5)
    last, _ = shared_group_attention(nn.Module(), q[:, :, -1:], k, v, None, softcap=softcap)
    assert torch.allclose(last, expected[:, -1:], atol=1e-5), "one query sees all keys"


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_query_a_row_follows_the_formula(groups: int, heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 8).transpose(1, 2), torch.randn(3, groups, 5, 8), torch.randn(3, groups, 5, 8)
    mask = torch.rand(3, heads, 1, 5) > 0.4
    mask[..., 0] = True
    for given in (mask, None):
        expected = by_formula(q, k, v, torch.ones(1, dtype=torch.bool) if given is None else given, None)
        found = grouped_attention(q, k, v, given, None)
        assert found.shape == q.shape and torch.allclose(found.transpose(1, 2), expected, atol=1e-5)


def test_the_scale_is_an_argument() -> None:
    q, k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    assert torch.allclose(grouped_attention(q, k, v, None, 0.0)[0, :, 0], v[0].mean(1), atol=1e-6)
