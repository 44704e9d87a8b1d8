"""Decode many prompts at once, without drafts: for writing data, where tokens per second of all rows count.

Rows are padded on the left; rows that have ended leave the batch once they are a good part of it. Knows
nothing of chats or files, and its tokens are not promised to be bit-equal to `generate`'s.

Legend: B rows still writing, T tokens so far (padding included), V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spechead.target.cache import KVCache
from spechead.target.model import Target

LEAVE_SHARE = 0.125  # ended rows stay in the batch until they are this share of it: moving a cache costs, too


@dataclass(frozen=True)
class Draw:
    """How a token is chosen: greedy at temperature 0, else top-k, then top-p inside it."""

    temperature: float = 0.0
    top_k: int = 100
    top_p: float = 1.0

    def __call__(self, logits: Tensor, generator: torch.Generator) -> Tensor:  # [B, V] -> [B]
        if self.temperature == 0:
            return logits.max(-1).indices
        # Sorting the whole vocabulary would cost more than the model does; top-p is cut inside the top-k.
        best, ids = logits.topk(min(self.top_k, logits.shape[-1]), -1)  # [B, k], descending
        shares = torch.softmax(best.float() / self.temperature, -1)
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= self.top_p, 0.0)
        choice = torch.multinomial(shares, 1, generator=generator)  # [B, 1]
        return ids.gather(-1, choice)[:, 0]


@dataclass
class Written:
    """What one prompt was continued with; the ending token is not in `tokens`."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False


def use_batch_attention(target: Target) -> None:
    """Give the target transformers' own attention: with padding masks and many rows the fastest on a CPU, and
    finite for padding; the eager one where scores are capped, which SDPA leaves out."""
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
) -> list[Written]:
    """Continue every prompt until one of `stop_ids` or the cap; results in the order of the prompts."""
    written = [Written() for _ in prompts]
    if not prompts:
        return written
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    ids, mask = pad_left(prompts, device)  # [B, T]
    rows = list(range(len(prompts)))
    cache = KVCache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # [B, T]
    for _ in range(max_new_tokens):
        known: dict[str, Any] = {target.cache_keyword: cache, "use_cache": True}
        out = target.decoder(input_ids=ids, attention_mask=mask, position_ids=positions, **known)
        tokens = draw(target.logits(out.last_hidden_state[:, -1]), generator)  # [B]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if written[row].finished:
                continue
            if token in stop_ids:
                written[row].finished = True
            else:
                written[row].tokens.append(token)
        alive = [i for i, row in enumerate(rows) if not written[row].finished]
        if not alive:
            break
        if len(rows) - len(alive) >= LEAVE_SHARE * len(rows):
            index = torch.tensor(alive, device=device)
            cache.select(index)
            rows, tokens, mask = [rows[i] for i in alive], tokens[index], mask[index]
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
