"""The decode loop: draft, verify, accept, keep. Plain decoding is the same loop without a drafter.

Knows nothing of how drafts are made, of templates or of files. One text at a time.

Legend: P prompt tokens, N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spechead.cache import KVCache
from spechead.drafters.base import Drafter
from spechead.errors import UserError
from spechead.sampling import Sampler
from spechead.target import Target, TargetOutput
from spechead.tree import Plan, Tree
from spechead.verify import accept

OnCommit = Callable[[list[int], int], None]
PHASES = ("prefill", "draft", "verify", "commit", "other")


@dataclass
class Stats:
    """What one generation did. The prefill and the token it yields are not counted as a pass."""

    passes: int = 0
    tokens: int = 0  # committed by passes, the bonus included, a cut tail not
    committed: list[int] = field(default_factory=list)  # tokens of each pass
    drafted: list[int] = field(default_factory=list)  # depth of the tree of each pass
    accepted: list[int] = field(default_factory=list)  # drafts accepted in each pass, before any cut
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


@dataclass
class Generation:
    """A text and how it came about."""

    tokens: list[int]  # new tokens; the end-of-sequence token is the last where one was drawn
    finish_reason: str  # "eos", "stop" or "length"
    stats: Stats
    gaps: list[float]  # difference of the two best logits where each token was drawn (only if asked for)


def generate(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    *,
    tree: Plan | None = None,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    stop: Sequence[str] = (),
    on_commit: OnCommit | None = None,
    keep_gaps: bool = False,
) -> Generation:
    """Decode behind `prompt` until an end-of-sequence token, a stop string or `max_new_tokens`.

    `on_commit(tokens, accepted)` is called after the prefill with the first token and 0, then once a pass with its
    tokens, of which the first `accepted` were drafts.
    """
    cap = _cap(target, len(prompt), max_new_tokens)
    sampler = sampler or Sampler()
    plan = tree or (drafter.tree if drafter else None)
    layers = drafter.layers if drafter else ()
    clock, text = _Clock(target.device), _Text(target, cap, stop, on_commit)
    cache, stats = KVCache(), Stats()
    ids = torch.tensor(prompt, device=target.device)  # [P]

    out = target.forward(ids[None], layers=layers, cache=cache)
    logits = target.logits(out.hidden[0, -1:])  # [1, V]
    first = int(sampler.draw(logits, [len(prompt)]))
    text.gaps += _gaps(logits, [0]) if keep_gaps else []
    text.commit([first], 0)
    state = drafter.new_state(ids) if drafter else None
    fresh = torch.cat([ids[1:], torch.tensor([first], device=target.device)])  # [P]
    clock.lap("prefill")

    while not text.finish_reason:
        past = cache.length
        draft = _propose(drafter, state, fresh, out, plan, room=min(text.room, target.max_positions - past) - 1)
        clock.lap("draft")
        nodes = target.forward(
            draft.tokens[None],
            layers=layers,
            cache=cache,
            positions=past + draft.depths[None],
            visible=draft.visible[None] if len(draft) > 1 else None,
        )
        logits = target.logits(nodes.hidden[0])  # [N, V]
        depths = draft.depths.tolist()
        drawn = sampler.draw(logits, [past + 1 + depth for depth in depths])  # [N]
        result = accept(draft, drawn)
        clock.lap("verify")
        cache.keep(past, result.path)
        path = torch.tensor(result.path, device=target.device)
        out, fresh = nodes.rows(path), torch.tensor(result.tokens, device=target.device)
        text.gaps += _gaps(logits, result.path) if keep_gaps else []
        clock.lap("commit")
        kept = text.commit(result.tokens, len(result.path) - 1)
        stats.passes += 1
        stats.tokens += kept
        stats.committed.append(kept)
        stats.drafted.append(max(depths))
        stats.accepted.append(len(result.path) - 1)
        clock.lap("other")
    stats.seconds = clock.seconds
    return Generation(text.tokens, text.finish_reason, stats, text.gaps[: len(text.tokens)])


def _propose(
    drafter: Drafter | None, state: Any, fresh: Tensor, out: TargetOutput, plan: Plan | None, room: int
) -> Tree:
    """The drafter's tree, without drafts that could not be committed any more (`room` tokens besides the bonus)."""
    if drafter is None or plan is None or room < 1:
        return Tree.root(fresh[-1:])
    return drafter.propose(state, fresh, out, plan).pruned(room)


def _cap(target: Target, prompt: int, max_new_tokens: int) -> int:
    if prompt == 0:
        raise UserError("the prompt is empty; decoding needs at least one token")
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens {max_new_tokens} is below 1")
    if prompt >= target.max_positions:
        raise UserError(
            f"the prompt has {prompt} tokens, but target {target.name!r} has {target.max_positions} positions"
        )
    return min(max_new_tokens, target.max_positions - prompt)


def _gaps(logits: Tensor, path: Sequence[int]) -> list[float]:
    best = logits[list(path)].topk(2, -1).values  # [n, 2]
    return (best[:, 0] - best[:, 1]).tolist()


class _Text:
    """The new tokens and the rule that ends them: the first of an end-of-sequence token, a stop string and the cap."""

    def __init__(self, target: Target, cap: int, stop: Sequence[str], on_commit: OnCommit | None) -> None:
        self.tokens: list[int] = []
        self.gaps: list[float] = []
        self.finish_reason = ""
        self._cap, self._eos, self._on_commit = cap, target.eos_ids, on_commit
        self._stop, self._tokenizer = [text for text in stop if text], target.tokenizer

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self._cap - len(self.tokens)

    def commit(self, tokens: list[int], accepted: int) -> int:
        """Append `tokens` up to the first end; returns how many were kept."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in self._eos:
                self.finish_reason = "eos"
            elif self._stop and self._stopped():
                self.finish_reason = "stop"
            elif len(self.tokens) == self._cap:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        kept = len(self.tokens) - before
        if self._on_commit:
            self._on_commit(self.tokens[before:], min(accepted, kept))
        return kept

    def _stopped(self) -> bool:
        """Whether a stop string ends in the newest token; it may have begun up to its own length of tokens before."""
        reach = 1 + max(len(text.encode()) for text in self._stop)
        tail = self._tokenizer.decode(self.tokens[-reach:], skip_special_tokens=False)
        return any(text in tail for text in self._stop)


class _Clock:
    """Seconds by phase, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._device = device
        self._last = self._now()

    def lap(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] += now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
