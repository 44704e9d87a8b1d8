"""Decode many prompts at once, without drafts: for generating data, where the throughput of all rows counts.

Rows are padded on the left; finished rows leave the batch once they are a good part of it. The tokens need not be
bit-equal to those of `decoding.generate`.

Legend: B rows still decoding, T tokens so far (padding included), V vocabulary, k candidates.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spechead.target.cache import KVCache
from spechead.target.model import Target

COMPACT_SHARE = 0.125  # finished rows stay until they are this share of the batch: moving a cache costs, too


@dataclass(frozen=True)
class Draw:
    """How a token is chosen: greedy at temperature 0, else top-k, then top-p inside it.

    `decoding.sampling.warp` applies the same rules to the whole vocabulary; its noise is tied to the position.
    """

    temperature: float = 0.0
    top_k: int = 100
    top_p: float = 1.0

    def __call__(self, logits: Tensor, generator: torch.Generator) -> Tensor:  # [B, V] -> [B]
        if self.temperature == 0:
            return logits.max(-1).indices
        # Drawing from the whole vocabulary would cost more than the model does.
        best, ids = logits.topk(min(self.top_k, logits.shape[-1]), -1)  # [B, k], descending
        shares = torch.softmax(best.float() / self.temperature, -1)
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= self.top_p, 0.0)
        choice = torch.multinomial(shares, 1, generator=generator)  # [B, 1]
        return ids.gather(-1, choice)[:, 0]


@dataclass
class Continuation:
    """The continuation of one prompt; the token that ended it is not in `tokens`."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False


def use_batch_attention(target: Target) -> None:
    """Switch the target to transformers' own attention: the fastest on a CPU with padding masks and many rows, and
    finite for padding; eager attention where scores are capped, which SDPA does not support."""
    capped = getattr(target.config, "attn_logit_softcapping", None)
    fast = getattr(target.model, "_supports_sdpa", False) and not capped
    target.model.set_attn_implementation("sdpa" if fast else "eager")


@torch.inference_mode()
def continue_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    draw: Draw,
    seed: int = 0,
) -> list[Continuation]:
    """Continue every prompt until one of `stop_ids` or the cap; results in the order of the prompts."""
    written = [Continuation() for _ in prompts]
    if not prompts:
        return written
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    ids, mask = pad_left(prompts, device)  # [B, T]
    rows = list(range(len(prompts)))
    cache = KVCache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # [B, T]
    for _ in range(max_new_tokens):
        caching: dict[str, Any] = {target.cache_keyword: cache, "use_cache": True}
        out = target.decoder(input_ids=ids, attention_mask=mask, position_ids=positions, **caching)
        tokens = draw(target.logits(out.last_hidden_state[:, -1]), generator)  # [B]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if written[row].finished:
                continue
            if token in stop_ids:
                written[row].finished = True
            else:
                written[row].tokens.append(token)
        active = [i for i, row in enumerate(rows) if not written[row].finished]
        if not active:
            break
        if len(rows) - len(active) >= COMPACT_SHARE * len(rows):
            index = torch.tensor(active, device=device)
            cache.select(index)
            rows, tokens, mask = [rows[i] for i in active], tokens[index], mask[index]
        ids = tokens[:, None]  # [B, 1]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], -1)
        positions = mask.sum(-1, keepdim=True) - 1
    return written


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, T], the prompts ending at the right edge."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
