"""The attention function of targets: torch's SDPA, with keys and values shared inside a query group.

transformers copies keys and values for every query group when an explicit mask is given, which makes the verification
of a tree slower than necessary. Without a mask, several queries are causal.

Legend: B batch, N query heads, G key/value heads, Q queries, S keys, C head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "spechead"


def shared_group_attention(
    module: nn.Module,
    query: Tensor,  # [B, N, Q, C]
    key: Tensor,  # [B, G, S, C]
    value: Tensor,  # [B, G, S, C]
    attention_mask: Tensor | None,  # additive or bool, [B, 1, Q, S]
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' AttentionInterface. Returns [B, Q, N, C]."""
    causal = attention_mask is None and query.shape[2] > 1 and is_causal is not False
    if softcap:
        return _softcapped(query, key, value, attention_mask, scaling, softcap, causal), None
    out = grouped_attention(query, key, value, attention_mask, scaling, causal)
    return out.transpose(1, 2).contiguous(), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None, causal: bool = False
) -> Tensor:
    """SDPA [B, N, Q, C] whose query groups share keys and values.

    One query: those of a group become the queries of one head, several times as fast on a CPU in bfloat16. Several on
    an accelerator, with a mask: keys and values are copied, since only the slowest kernel shares them there.
    """
    shared = query.shape[1] != key.shape[1]
    if shared and query.shape[2] == 1 and (mask is None or mask.shape[1] == 1):
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])  # [B, G, N/G, C]
        return F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale).view(query.shape)
    if shared and mask is not None and query.device.type != "cpu":
        groups = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=shared
    )


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
    causal: bool,
) -> Tensor:
    """Attention with scores softcap·tanh(s/softcap) (Gemma 2), which SDPA does not support."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap  # [B, N, Q, S]
    if causal:
        size = (query.shape[2], key.shape[2])
        hidden = torch.ones(size, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, shared_group_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # so that transformers' own generate builds masks for it
