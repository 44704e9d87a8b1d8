"""From logits to tokens: processors, temperature, top-k, top-p, min-p, and draws with noise tied to the position.

The noise of a position depends on the seed and on the position alone (the Gumbel-max trick), so a sampled text is the
same whether its tokens were decoded one by one or verified in a tree: sampling is checked by equality, as greedy
decoding is. Knows nothing of models.

Legend: N rows of logits (nodes of a tree), V vocabulary, L tokens of a prefix, D draft vocabulary, k draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spechead.decoding.random_source import RandomSource
from spechead.decoding.tree import Tree
from spechead.errors import UserError

_MIX_SEED, _MIX_POSITION, _MODULUS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 1 << 63

Processor = Callable[[Tensor, Tensor], Tensor]
"""processor(prefixes int64 [n, L], logits [n, V]) -> logits [n, V], as a `LogitsProcessor` of transformers.

What it gives for a row must follow from that row's prefix and logits alone. One that remembers its earlier calls (a
grammar that advances, a watermark with a state) is not allowed: it is asked about drafts that are then rejected, about
several prefixes of one length at once, and about some lengths twice.
"""


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Logits [N, V] under temperature, then top-k, top-p and min-p, in this order; what is cut becomes -inf.

    min-p (arXiv 2407.01082) cuts tokens less probable than that share of the likeliest. Temperature 0 is not for here.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    logits = logits / temperature
    kept = min(top_k, logits.shape[-1]) if top_k else logits.shape[-1]
    if kept < logits.shape[-1] or top_p < 1.0:
        best, order = logits.topk(kept, -1)  # [N, kept], descending; sorting few is what top-k saves top-p
        if top_p < 1.0:
            shares = best.softmax(-1)
            best = best.masked_fill(shares.cumsum(-1) - shares >= top_p, float("-inf"))  # by the mass ahead of each
        logits = torch.full_like(logits, float("-inf")).scatter(-1, order, best)
    if min_p > 0.0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < min_p * shares.amax(-1, keepdim=True), float("-inf"))
    return logits


@dataclass(frozen=True)
class RepetitionPenalty:
    """What the prefix holds loses: positive logits are divided by `penalty`, others multiplied (arXiv 1909.05858)."""

    penalty: float

    def __call__(self, prefixes: Tensor, logits: Tensor) -> Tensor:
        held = logits.gather(1, prefixes)  # [n, L]
        return logits.scatter(1, prefixes, torch.where(held < 0, held * self.penalty, held / self.penalty))


class Sampler:
    """The target's distribution at each node, and one token drawn from it. The same seed gives the same text."""

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        *,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        processors: Sequence[Processor] = (),
    ) -> None:
        if temperature < 0:
            raise UserError(f"temperature {temperature} is negative; 0 is greedy")
        if top_k < 0:
            raise UserError(f"top-k {top_k} is negative; 0 keeps all tokens")
        if not 0 < top_p <= 1:
            raise UserError(f"top-p {top_p} is not in (0, 1]; 1 keeps all tokens")
        if not 0 <= min_p < 1:
            raise UserError(f"min-p {min_p} is not in [0, 1); 0 keeps all tokens")
        if repetition_penalty <= 0:
            raise UserError(f"repetition-penalty {repetition_penalty} is not above 0; 1 is none")
        self.temperature, self.top_k, self.top_p, self.min_p, self.seed = temperature, top_k, top_p, min_p, seed
        penalty = [RepetitionPenalty(repetition_penalty)] if repetition_penalty != 1.0 else []
        self.processors: list[Processor] = [*penalty, *processors]
        self._noise: dict[int, Tensor] = {}

    def processed(self, logits: Tensor, tree: Tree, text: Tensor) -> Tensor:
        """Logits [N, V] after the processors, each node with its own prefix: `text` [L], whose last token is the root,
        and the drafts on the node's path."""
        if not self.processors:
            return logits
        logits = logits.clone()
        for depth in range(tree.depth + 1):  # prefixes of a level have one length
            nodes = (tree.depths == depth).nonzero()[:, 0]  # [n]
            paths = tree.tokens[tree.visible[nodes].nonzero()[:, 1].view(len(nodes), depth + 1)]  # [n, depth+1]
            prefixes = torch.cat([text[:-1].expand(len(nodes), -1), paths], 1)  # [n, L+depth]
            level = logits[nodes]  # [n, V]
            for processor in self.processors:
                level = processor(prefixes, level)
            logits[nodes] = level
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distributions [N, V] that processed logits stand for; all on one token when greedy."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        return warp(logits, self.temperature, self.top_k, self.top_p, self.min_p).softmax(-1)

    def draw(self, logits: Tensor, places: Sequence[int], which: Tensor | None = None) -> Tensor:
        """int64 [N] from processed logits [N, V]. The token of row i takes the place `places[which[i]]` in the text,
        `which` int64 [N] being 0, 1, ... where it is not given."""
        if self.temperature == 0:
            return logits.max(-1).indices  # on a CPU several times as fast as argmax
        for gone in [place for place in self._noise if place < places[0]]:  # the text only moves on
            del self._noise[gone]
        noise = torch.stack([self._gumbel(place, logits) for place in places])  # [places, V]
        noise = noise if which is None else noise[which]  # [N, V]
        return (warp(logits, self.temperature, self.top_k, self.top_p, self.min_p) + noise).argmax(-1)

    def _gumbel(self, position: int, like: Tensor) -> Tensor:
        """Standard Gumbel noise [V] of one place in the text, drawn on the CPU so that every device gets the same."""
        if position not in self._noise:
            seed = (self.seed * _MIX_SEED + (position + 1) * _MIX_POSITION) % _MODULUS
            generator = torch.Generator().manual_seed(seed)
            exponential = torch.empty(like.shape[-1]).exponential_(generator=generator)
            self._noise[position] = -exponential.log().to(like.device)
        return self._noise[position]


@dataclass
class Drawing:
    """How a drafter samples its drafts, where it does not rank them."""

    temperature: float
    chance: RandomSource

    def draw(self, logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k draws without replacement from each row of `logp` [n, D] under the temperature: ids int64 [n, k] in the
        order drawn, and the distributions [n, D] that they were drawn from, kept exactly as they were used."""
        q = (logp / self.temperature).softmax(-1)
        q = q.clamp(min=torch.finfo(q.dtype).tiny)  # so that k tokens can be drawn however peaked it is
        rows = q.cpu()
        drawn = []
        for row in rows:
            left = row.clone()
            for _ in range(k):
                token = self.chance.categorical(left)
                left[token] = 0
                drawn.append(token)
        return torch.tensor(drawn, device=logp.device).view(-1, k), q
