"""From logits to tokens: processors, temperature, top-k, top-p, min-p, and draws with noise tied to the position.

The noise of a position depends on the seed and on the position alone (the Gumbel-max trick), so that a sampled text is
the same whether its tokens are decoded one by one or verified in a tree: sampling is tested by equality, as greedy
decoding is.

Legend: N rows of logits (nodes of a tree), V vocabulary, L tokens of a prefix, D draft vocabulary, k draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import torch
from torch import Tensor

from spechead.decoding.random_source import RandomSource
from spechead.decoding.tree import Tree
from spechead.errors import UserError
from spechead.options import Options, Range

_MIX_SEED, _MIX_POSITION, _MODULUS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 1 << 63

Processor = Callable[[Tensor, Tensor], Tensor]
"""processor(prefixes int64 [n, L], logits [n, V]) -> logits [n, V], as a `LogitsProcessor` of transformers.

The result for a row must depend on that row's prefix and logits alone. A processor that remembers earlier calls (a
grammar that advances, a watermark with a state) is not supported: it is called for drafts that are then rejected, for
several prefixes of one length at once, and for some lengths twice.
"""

COLDEST = 1e-30  # below it, logits over the temperature leave the range of float32; the draw is greedy long before


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Logits [N, V] under temperature, then top-k, top-p and min-p, in this order; tokens that are cut become -inf.

    min-p (arXiv 2407.01082) cuts tokens less probable than that share of the likeliest. The temperature is above 0.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    logits = logits / max(temperature, COLDEST)
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
    """Tokens of the prefix lose: positive logits are divided by `penalty`, others multiplied (arXiv 1909.05858)."""

    penalty: float

    def __call__(self, prefixes: Tensor, logits: Tensor) -> Tensor:
        seen = logits.gather(1, prefixes)  # [n, L]
        return logits.scatter(1, prefixes, torch.where(seen < 0, seen * self.penalty, seen / self.penalty))


@dataclass(eq=False)
class Sampler(Options):
    """The target's distribution at each node, and one token drawn from it. The same seed gives the same text.

    Raises UserError where a setting is out of range.
    """

    temperature: Annotated[float, Range(0)] = 0.0  # 0: greedy
    top_k: Annotated[int, Range(0)] = 0  # 0: all tokens
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    seed: int = 0
    _: KW_ONLY
    min_p: Annotated[float, Range(0, below=1)] = 0.0
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0  # 1: none
    processors: Sequence[Processor] = ()  # applied after the repetition penalty

    def __post_init__(self) -> None:
        super().__post_init__()
        penalty = [RepetitionPenalty(self.repetition_penalty)] if self.repetition_penalty != 1.0 else []
        self._processors: list[Processor] = [*penalty, *self.processors]
        self._noise: dict[int, Tensor] = {}  # by place in the text

    def processed(self, logits: Tensor, tree: Tree, text: Tensor) -> Tensor:
        """Logits [N, V] after the processors, each node with its own prefix: `text` [L], whose last token is the root,
        followed by the drafts on the node's path."""
        if not self._processors:
            return logits
        logits = logits.clone()
        for depth in range(tree.depth + 1):  # prefixes of a level have one length
            nodes = (tree.depths == depth).nonzero()[:, 0]  # [n]
            paths = tree.tokens[tree.visible[nodes].nonzero()[:, 1].view(len(nodes), depth + 1)]  # [n, depth+1]
            prefixes = torch.cat([text[:-1].expand(len(nodes), -1), paths], 1)  # [n, L+depth]
            level = logits[nodes]  # [n, V]
            for processor in self._processors:
                level = processor(prefixes, level)
            logits[nodes] = level
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distributions [N, V] given by processed logits; one-hot when greedy."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        return warp(logits, self.temperature, self.top_k, self.top_p, self.min_p).softmax(-1)

    def draw(self, logits: Tensor, places: Sequence[int], which: Tensor | None = None) -> Tensor:
        """Tokens int64 [N] drawn from processed logits [N, V]. The token of row i takes the place `places[which[i]]` in
        the text; `which` int64 [N] is 0, 1, ... by default."""
        if self.temperature == 0:
            return logits.max(-1).indices  # on a CPU several times as fast as argmax
        for place in [place for place in self._noise if place < places[0]]:  # the text only grows
            del self._noise[place]
        noise = torch.stack([self._gumbel(place, logits) for place in places])  # [places, V]
        noise = noise if which is None else noise[which]  # [N, V]
        return (warp(logits, self.temperature, self.top_k, self.top_p, self.min_p) + noise).argmax(-1)

    def _gumbel(self, position: int, like: Tensor) -> Tensor:
        """Standard Gumbel noise [V] for one place in the text, drawn on the CPU so that it is equal on every device."""
        if position not in self._noise:
            seed = (self.seed * _MIX_SEED + (position + 1) * _MIX_POSITION) % _MODULUS
            generator = torch.Generator().manual_seed(seed)
            exponential = torch.empty(like.shape[-1]).exponential_(generator=generator)
            self._noise[position] = -exponential.log().to(like.device)
        return self._noise[position]


@dataclass
class Drawing:
    """How a drafter samples its drafts instead of ranking them."""

    temperature: float
    random: RandomSource

    def draw(self, logp: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k draws without replacement from each row of `logp` [n, D] under the temperature: ids int64 [n, k] in the
        order drawn, and the distributions [n, D] that they were drawn from, kept exactly as they were used.

        Raises UserError where `logp` is not finite."""
        q = (logp / max(self.temperature, COLDEST)).softmax(-1)
        q = q.clamp(min=torch.finfo(q.dtype).tiny)  # so that k tokens can be drawn however peaked it is
        rows = q.cpu()
        if not rows.isfinite().all():
            raise UserError(
                "the drafter computes values that are not finite (infinite or NaN), and drafts cannot be drawn from "
                "them; use --draft-dtype float32, or another head"
            )
        drawn = []
        for row in rows:
            left = row.clone()
            for _ in range(k):
                token = self.random.categorical(left)
                left[token] = 0
                drawn.append(token)
        return torch.tensor(drawn, device=logp.device).view(-1, k), q
