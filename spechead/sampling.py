"""Draw tokens from logits: greedy, or temperature, top-k and top-p with noise tied to the position in the text.

The noise of a position depends on the seed and on the position alone (the Gumbel-max trick), so a sampled text is the
same whether its tokens were decoded one by one or verified in a tree: sampling is checked by equality, as greedy
decoding is. Knows nothing of trees.

Legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spechead.errors import UserError

_MIX_SEED, _MIX_POSITION, _MODULUS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 1 << 63


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits [N, V] under temperature, then top-k, then top-p; what is cut becomes -inf.

    Temperature 0 is not for here.
    """
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass ahead of each token
        cut = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        logits = logits.masked_fill(cut, float("-inf"))
    return logits


class Sampler:
    """Draws one token per row of logits. The same seed gives the same text."""

    def __init__(self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        if temperature < 0:
            raise UserError(f"temperature {temperature} is negative; 0 is greedy")
        if top_k < 0:
            raise UserError(f"top-k {top_k} is negative; 0 keeps all tokens")
        if not 0 < top_p <= 1:
            raise UserError(f"top-p {top_p} is not in (0, 1]; 1 keeps all tokens")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed
        self._noise: dict[int, Tensor] = {}

    def draw(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """int64 [N] from logits [N, V]; `positions` [N] are the places in the text that the tokens would take."""
        if self.temperature == 0:
            return logits.argmax(-1)
        noise = torch.stack([self._gumbel(place, logits) for place in positions])  # [N, V]
        return (warp(logits, self.temperature, self.top_k, self.top_p) + noise).argmax(-1)

    def _gumbel(self, position: int, like: Tensor) -> Tensor:
        """Standard Gumbel noise [V] of one place in the text, drawn on the CPU so that every device gets the same."""
        if position not in self._noise:
            for old in [place for place in self._noise if place < position - 64]:
                del self._noise[old]
            seed = (self.seed * _MIX_SEED + (position + 1) * _MIX_POSITION) % _MODULUS
            generator = torch.Generator().manual_seed(seed)
            exponential = torch.empty(like.shape[-1]).exponential_(generator=generator)
            self._noise[position] = -exponential.log().to(like.device)
        return self._noise[position]
