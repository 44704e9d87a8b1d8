"""Decode many requests without drafts, a fixed number side by side: for data, where the throughput of all rows counts.

A row that has ended leaves its place to the next request: the new prompt runs in a pass of its own, and its keys and
values replace those of the row. With many rows a few are replaced together, so that such a pass pays. Each request has
its own temperature and its own random numbers, so that its text does not depend on its neighbours (up to rounding,
which differs with the shape of a pass).

Legend: B rows, n new rows, P tokens of the longest new prompt, V vocabulary, k candidates.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spechead.decoding.sampling import COLDEST
from spechead.errors import UserError
from spechead.target.cache import KVCache
from spechead.target.model import Target

REFILL_SHARE = 1 / 16  # free places are filled once they are this share of the batch: a pass over one prompt costs
COMPACT_SHARE = 1 / 8  # without further requests, they are dropped at this share: moving a cache costs, too
PREFILL_TOKENS = 4096  # of one pass over new prompts, padding included: bounds its memory


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    key: Hashable  # of the caller's, not read here
    prompt: list[int]
    max_new_tokens: int
    temperature: float  # 0: greedy
    seed: int  # of its random numbers


@dataclass
class Continuation:
    """What was written after one prompt."""

    tokens: list[int]  # without the one that ended it
    finished: bool = False  # ended by one of the stop ids, not by a cap
    end: int | None = None  # the stop id that ended it


Done = Callable[[Request, Continuation], Iterable[Request]]


class ContinuousDecoder:
    """Decodes `batch_size` requests side by side until one of `stop_ids`, their cap or the target's last position.

    Above temperature 0, a token is drawn from the `top_k` most likely ones, and of these from those before which less
    than `top_p` of the mass lies. `decoding.sampling.warp` applies the same rules to the whole vocabulary; its noise is
    tied to the position.
    """

    def __init__(
        self, target: Target, *, batch_size: int, stop_ids: Collection[int], top_k: int = 100, top_p: float = 1.0
    ) -> None:
        self.target, self.batch_size, self.stop_ids = target, batch_size, frozenset(stop_ids)
        self.top_k, self.top_p = top_k, top_p

    @torch.inference_mode()
    def run(self, requests: Iterator[Request], done: Done) -> None:
        """Decode all `requests`, which are read as places become free.

        `done` gets each request with its continuation, in the order in which they end, and may return further requests,
        which come next. A prompt that leaves no position, or is empty, is handed to `done` without tokens. Raises
        UserError where logits are not finite.
        """
        batch = _Batch(self, requests, done)
        while batch.fill():
            batch.step()

    def draw(self, logits: Tensor, rows: Sequence[_Row]) -> list[int]:  # float32 [B, V]
        """The next token of each row."""
        best, tokens = logits.max(-1)  # [B]
        self.target.check_finite(best[:0], best)
        sampled = [i for i, row in enumerate(rows) if row.request.temperature > 0]
        if sampled:
            index = torch.tensor(sampled, device=logits.device)
            temperatures = logits.new_tensor([rows[i].request.temperature for i in sampled])[:, None]  # [n, 1]
            # Drawing from the whole vocabulary would cost more than the model does.
            candidates, ids = logits[index].topk(min(self.top_k, logits.shape[-1]), -1)  # [n, k], descending
            shares = torch.softmax(candidates.double() / temperatures.clamp(min=COLDEST), -1)  # [n, k]
            shares = shares.masked_fill(shares.cumsum(-1) - shares >= self.top_p, 0.0)
            draws = shares.new_tensor([rows[i].random.random() for i in sampled])[:, None]  # [n, 1]
            sums = shares.cumsum(-1)
            choice = (sums <= draws * sums[:, -1:]).sum(-1, keepdim=True)  # [n, 1]
            choice = choice.minimum((shares > 0).sum(-1, keepdim=True) - 1)  # rounding
            tokens[index] = ids.gather(-1, choice)[:, 0]
        return tokens.tolist()


@dataclass
class _Row:
    """A request that has a place in the batch."""

    request: Request
    cap: int  # tokens that it may write
    random: random.Random
    tokens: list[int] = field(default_factory=list)  # so far


class _Batch:
    """The rows that are decoded side by side, and the requests that wait for a place."""

    def __init__(self, decoder: ContinuousDecoder, requests: Iterator[Request], done: Done) -> None:
        self.decoder, self.target = decoder, decoder.target
        self.rows: list[_Row | None] = []  # None: the place is free
        self.cache = KVCache()
        self._requests, self._done = requests, done
        self._next: deque[Request] = deque()  # what `done` returned

    @property
    def open(self) -> int:
        """How many more rows the batch may have."""
        return self.decoder.batch_size - sum(row is not None for row in self.rows)

    def fill(self) -> bool:
        """Give the free places to the next requests; returns whether there is anything to decode."""
        if self.open >= max(1, REFILL_SHARE * self.decoder.batch_size):
            while new := self._take(self.open):
                for group in _groups(new):
                    self._begin(group)
        active = [place for place, row in enumerate(self.rows) if row is not None]
        free = len(self.rows) - len(active)
        if active and free and free >= COMPACT_SHARE * len(self.rows):
            self.cache.select(torch.tensor(active, device=self.target.device))
            self.rows = [self.rows[place] for place in active]
        return bool(active)

    def step(self) -> None:
        """Write one more token of every row."""
        self._reread()
        ids = [[row.tokens[-1] if row else 0] for row in self.rows]  # a free place is computed, too
        past = self.cache.length
        out = self.target.forward(torch.tensor(ids, device=self.target.device), cache=self.cache)
        self.cache.keep([[0] if row else [] for row in self.rows], past)
        places = [place for place, row in enumerate(self.rows) if row is not None]
        rows = [row for row in self.rows if row is not None]
        hidden = out.hidden[:, -1]  # [B, H]
        if len(rows) < len(self.rows):
            hidden = hidden[torch.tensor(places, device=hidden.device)]
        tokens = self.decoder.draw(self.target.logits(hidden), rows)
        for place, row, token in zip(places, rows, tokens, strict=True):
            if self._append(row, token):
                self.rows[place] = None

    def _reread(self) -> None:
        """Read rows again that have outgrown the rotary factors they were read with."""
        for place, row in enumerate(self.rows):
            if row is None:
                continue
            length = len(row.request.prompt) + len(row.tokens)
            if self.target.outgrows(length - 1, length):
                text = torch.tensor(row.request.prompt + row.tokens, device=self.target.device)
                self.target.reread(self.cache, place, text)

    def _take(self, count: int) -> list[_Row]:
        """Up to `count` of the next requests; those without room are done at once."""
        rows: list[_Row] = []
        while len(rows) < count:
            request = self._next.popleft() if self._next else next(self._requests, None)
            if request is None:
                break
            cap = min(request.max_new_tokens, self.target.max_positions - len(request.prompt))
            if any(not 0 <= token < self.target.vocab_size for token in request.prompt):
                raise UserError(
                    f"a prompt has token ids beyond the {self.target.vocab_size} embeddings of {self.target.name!r}; "
                    "its tokenizer may be that of another model"
                )
            if cap < 1 or not request.prompt:
                self._next.extend(self._done(request, Continuation([])))
            else:
                rows.append(_Row(request, cap, random.Random(request.seed)))
        return rows

    def _begin(self, rows: list[_Row]) -> None:
        """Run the prompts of new rows, draw the first token of each, and give a place to those that go on."""
        lengths = [len(row.request.prompt) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)  # [n, P], padded on the right
        for index, row in enumerate(rows):
            ids[index, : lengths[index]] = torch.tensor(row.request.prompt)
        cache = KVCache()
        last = torch.tensor(lengths)[:, None] - 1  # [n, 1]
        positions = torch.arange(ids.shape[1]).minimum(last).to(self.target.device)  # [n, P]; none beyond its own text
        out = self.target.forward(ids.to(self.target.device), cache=cache, positions=positions)
        cache.set_lengths(lengths)
        hidden = out.hidden[range(len(rows)), [length - 1 for length in lengths]]  # [n, H]
        tokens = self.decoder.draw(self.target.logits(hidden), rows)
        going = [index for index, row in enumerate(rows) if not self._append(row, tokens[index])]
        if not going:
            return
        if len(going) < len(rows):
            cache.select(torch.tensor(going, device=self.target.device))
        self._place([rows[index] for index in going], cache)

    def _place(self, rows: list[_Row], cache: KVCache) -> None:
        """Put rows with their cache into free places, and make places for the others."""
        if not self.rows:
            self.rows, self.cache = [*rows], cache
            return
        places = [place for place, row in enumerate(self.rows) if row is None][: len(rows)]
        if missing := len(rows) - len(places):
            before = len(self.rows)
            self.cache.select(torch.tensor([*range(before), *[0] * missing], device=self.target.device))
            self.rows += [None] * missing
            places += range(before, before + missing)
        self.cache.insert(places, cache)
        for place, row in zip(places, rows, strict=True):
            self.rows[place] = row

    def _append(self, row: _Row, token: int) -> bool:
        """Append a token, and hand the row to `done` where it has ended; returns whether it has."""
        ended = token in self.decoder.stop_ids
        if not ended:
            row.tokens.append(token)
            if len(row.tokens) < row.cap:
                return False
        written = Continuation(row.tokens, ended, token if ended else None)
        self._next.extend(self._done(row.request, written))
        return True


def _groups(rows: list[_Row]) -> Iterator[list[_Row]]:
    """The rows by the length of their prompts, as many together as fit into one pass."""
    group: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.request.prompt)):
        if group and (len(group) + 1) * len(row.request.prompt) > PREFILL_TOKENS:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
