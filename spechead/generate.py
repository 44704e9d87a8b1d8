"""The decode loop: draft, verify, accept, keep. Plain decoding is the same loop without a drafter.

Several texts may be decoded side by side: each has its own drafts, its own draws and its own end, and comes out as it
would alone. Knows nothing of how drafts are made, of templates or of files.

Legend: B texts still being written, P prompt tokens, N nodes of the largest tree, n nodes of one, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.cache import KVCache
from spechead.chance import Seeded
from spechead.drafters.base import Drafter
from spechead.errors import UserError
from spechead.sampling import Drawing, Sampler
from spechead.target import Target, TargetOutput
from spechead.tree import Dynamic, Plan, Tree
from spechead.verify import RULES, Accepted, own_draw

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
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # of the whole batch


@dataclass
class Generation:
    """A text and how it came about."""

    tokens: list[int]  # new tokens; the end-of-sequence token is the last where one was drawn
    finish_reason: str  # "eos", "stop" or "length"
    stats: Stats
    gaps: list[float]  # difference of the two best logits where each token was drawn (only if asked for)


@dataclass(frozen=True)
class Speculation:
    """How drafts are made and judged; as it stands, drafts are ranked and the target's own draw judges them."""

    tree: Plan | None = None  # None: the drafter's own
    rule: str = ""  # one of verify.RULES; empty: own_draw, or rejection where drafts are sampled
    draft_temperature: float = 0.0  # above 0, drafts are sampled

    def __post_init__(self) -> None:
        if self.draft_temperature < 0:
            raise UserError(f"draft-temperature {self.draft_temperature} is negative; 0 ranks drafts")
        if not self.rule:
            object.__setattr__(self, "rule", "rejection" if self.draft_temperature else "own_draw")
        if self.rule not in RULES:
            raise UserError(f"rule {self.rule!r} is unknown; known are {', '.join(RULES)}")
        if RULES[self.rule].sampled and not self.draft_temperature:
            raise UserError(f"rule {self.rule!r} judges sampled drafts; give a draft-temperature above 0")
        if self.draft_temperature and isinstance(self.tree, Dynamic):
            raise UserError(f"tree {self.tree} ranks drafts and cannot sample them; use a chain or a static tree")


RANKED = Speculation()


def generate(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    *,
    speculation: Speculation = RANKED,
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
    return generate_batch(
        target,
        [prompt],
        drafter,
        speculation=speculation,
        max_new_tokens=max_new_tokens,
        samplers=[sampler or Sampler()],
        stop=stop,
        on_commit=None if on_commit is None else (lambda _, tokens, accepted: on_commit(tokens, accepted)),
        keep_gaps=keep_gaps,
    )[0]


def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    *,
    speculation: Speculation = RANKED,
    max_new_tokens: int = 256,
    samplers: Sequence[Sampler] | None = None,
    stop: Sequence[str] = (),
    on_commit: Callable[[int, list[int], int], None] | None = None,
    keep_gaps: bool = False,
) -> list[Generation]:
    """`generate` for several prompts at once; each text is what it would be alone.

    `samplers` has one for each prompt (default: greedy); `on_commit` is told the prompt's number first. Seconds are
    those of the whole batch.
    """
    if drafter is not None and speculation.tree is None:
        speculation = replace(speculation, tree=drafter.tree)
    clock = _Clock(target.device)
    texts = [
        _Text(target, prompt, sampler, speculation, max_new_tokens, stop, keep_gaps)
        for prompt, sampler in zip(prompts, samplers or [Sampler() for _ in prompts], strict=True)
    ]
    if on_commit is not None:
        for number, text in enumerate(texts):
            text.on_commit = partial(on_commit, number)
    cache, alive = KVCache(), list(texts)
    _prefill(target, texts, drafter, cache)
    clock.lap("prefill")
    while alive := _still_written(alive, cache):
        width = cache.length
        trees = [text.propose(drafter) for text in alive]
        clock.lap("draft")
        nodes = _forward(target, trees, alive, drafter, cache)
        logits = target.logits(nodes.hidden)  # [B, N, V]
        results = [
            text.judge(tree, logits[b, : len(tree)]) for b, (text, tree) in enumerate(zip(alive, trees, strict=True))
        ]
        clock.lap("verify")
        cache.keep([result.path for result in results], width)
        for b, (text, result) in enumerate(zip(alive, results, strict=True)):
            text.take(result, nodes.row(b))
        clock.lap("commit")
        for text, result in zip(alive, results, strict=True):
            text.append(result.tokens, len(result.path) - 1)
        clock.lap("other")
    return [text.generation(clock.seconds()) for text in texts]


def _prefill(target: Target, texts: Sequence[_Text], drafter: Drafter | None, cache: KVCache) -> None:
    """Read the prompts, padded on the right, and draw the first token of each."""
    lengths = [len(text.ids) for text in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.long, device=target.device)  # [B, P]
    for b, text in enumerate(texts):
        ids[b, : lengths[b]] = text.ids
    out = target.forward(ids, layers=drafter.layers if drafter else (), cache=cache)
    cache.settle(lengths)
    for b, text in enumerate(texts):
        rows = out.row(b, lengths[b])
        logits = target.logits(rows.hidden[0, -1:])  # [1, V]
        text.begin(rows, logits, drafter)


def _forward(
    target: Target, trees: Sequence[Tree], texts: Sequence[_Text], drafter: Drafter | None, cache: KVCache
) -> TargetOutput:
    """One pass over one tree of each text; smaller trees are padded with nodes that nobody sees."""
    layers = drafter.layers if drafter else ()
    width = max(map(len, trees))
    past = torch.tensor([text.length - 1 for text in texts], device=target.device)[:, None]  # [B, 1]
    if width == 1:
        return target.forward(torch.stack([tree.tokens for tree in trees]), layers=layers, cache=cache, positions=past)
    tokens = torch.stack([F.pad(tree.tokens, (0, width - len(tree))) for tree in trees])  # [B, N]
    depths = torch.stack([F.pad(tree.depths, (0, width - len(tree))) for tree in trees])  # [B, N]
    visible = torch.stack([_padded(tree.visible, width) for tree in trees])  # [B, N, N]
    return target.forward(tokens, layers=layers, cache=cache, positions=past + depths, visible=visible)


def _padded(visible: Tensor, width: int) -> Tensor:  # bool [n, n] -> [N, N]
    missing = width - visible.shape[0]
    if not missing:
        return visible
    padded = F.pad(visible, (0, missing, 0, missing))
    padded.diagonal()[-missing:] = True  # no row may be empty
    return padded


def _still_written(texts: list[_Text], cache: KVCache) -> list[_Text]:
    """The texts that have not ended; the others leave the cache, too."""
    alive = [b for b, text in enumerate(texts) if not text.finish_reason]
    if 0 < len(alive) < len(texts):
        cache.select(torch.tensor(alive, device=cache.layers[-1].device))
    return [texts[b] for b in alive]


class _Text:
    """One text of the batch: its tokens, its drafter's state, and the rule that ends it, which is the first of an
    end-of-sequence token, a stop string and the cap."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        sampler: Sampler,
        speculation: Speculation,
        max_new_tokens: int,
        stop: Sequence[str],
        keep_gaps: bool,
    ) -> None:
        self.cap = _cap(target, len(prompt), max_new_tokens)
        self.finish_reason = ""
        self.tokens: list[int] = []
        self.stats = Stats()
        self.gaps: list[float] = []
        self.on_commit: OnCommit | None = None
        self._prompt = len(prompt)
        self._ids = torch.zeros(len(prompt) + self.cap, dtype=torch.long, device=target.device)
        self._ids[: len(prompt)] = torch.tensor(prompt, device=target.device)
        self._target, self._sampler, self._speculation = target, sampler, speculation
        self._chance = Seeded(sampler.seed)
        self._stop, self._keep_gaps = [text for text in stop if text], keep_gaps

    @property
    def length(self) -> int:
        return self._prompt + len(self.tokens)

    @property
    def ids(self) -> Tensor:
        """int64 [length]: prompt and text so far."""
        return self._ids[: self.length]

    def begin(self, out: TargetOutput, logits: Tensor, drafter: Drafter | None) -> None:
        """Draw the first token from the prefill's last logits [1, V]; `out` [1, P, ...] is the prompt's."""
        logits = self._sampler.processed(logits, Tree.root(self.ids[-1:]), self.ids)
        first = self._sampler.draw(logits, [self.length])  # [1]
        self.gaps += _gaps(logits, [0]) if self._keep_gaps else []
        self._state = drafter.new_state(self.ids) if drafter else None
        self._fresh, self._out = torch.cat([self.ids[1:], first]), out  # [P], [1, P, ...]
        self.append(first.tolist(), 0)

    def propose(self, drafter: Drafter | None) -> Tree:
        """The drafter's tree, without drafts that could not be committed any more."""
        plan = self._speculation.tree
        positions = self._target.max_positions - self.length + 1
        room = min(self.cap - len(self.tokens), positions) - 1  # besides the bonus token
        if drafter is None or plan is None or room < 1:
            return Tree.root(self._fresh[-1:])
        heat = self._speculation.draft_temperature
        drawing = Drawing(heat, self._chance) if heat else None
        return drafter.propose(self._state, self._fresh, self._out, plan.limited(room), drawing).pruned(room)

    def judge(self, tree: Tree, logits: Tensor) -> Accepted:
        """Which drafts stay, given the target's logits [N, V], those of the tree's n nodes first."""
        logits = self._sampler.processed(logits[: len(tree)], tree, self.ids)  # [n, V]
        if self._speculation.rule == "own_draw":
            deepest = min(self._speculation.tree.depth if self._speculation.tree else 0, len(tree) - 1)
            places = range(self.length, self.length + deepest + 1)
            result = own_draw(tree, self._sampler.draw(logits, places, tree.depths))
        else:
            rule = RULES[self._speculation.rule].function
            result = rule(tree, self._sampler.probabilities(logits), self._chance)
        self.gaps += _gaps(logits, result.path) if self._keep_gaps else []
        self.stats.drafted.append(int(tree.depths.max()))
        self.stats.accepted.append(len(result.path) - 1)
        return result

    def take(self, result: Accepted, nodes: TargetOutput) -> None:
        """Remember the target's rows of the accepted path, from which the next draft is made."""
        path = torch.tensor(result.path, device=self._ids.device)
        self._out, self._fresh = nodes.rows(path), torch.tensor(result.tokens, device=self._ids.device)

    def append(self, tokens: list[int], accepted: int) -> None:
        """Append `tokens` up to the first end."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in self._target.eos_ids:
                self.finish_reason = "eos"
            elif self._stop and self._stopped():
                self.finish_reason = "stop"
            elif len(self.tokens) == self.cap:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        new = self.tokens[before:]
        self._ids[self.length - len(new) : self.length] = torch.tensor(new, device=self._ids.device)
        if before:  # the prefill's token is not a pass's
            self.stats.passes += 1
            self.stats.tokens += len(new)
            self.stats.committed.append(len(new))
        if self.on_commit:
            self.on_commit(new, min(accepted, len(new)))

    def generation(self, seconds: dict[str, float]) -> Generation:
        self.stats.seconds = seconds
        return Generation(self.tokens, self.finish_reason, self.stats, self.gaps[: len(self.tokens)])

    def _stopped(self) -> bool:
        """Whether a stop string ends in the newest token; it may have begun up to its own length of tokens before."""
        reach = 1 + max(len(text.encode()) for text in self._stop)
        tail = self._target.tokenizer.decode(self.tokens[-reach:], skip_special_tokens=False)
        return any(text in tail for text in self._stop)


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


class _Clock:
    """Seconds by phase. On an accelerator the marks are events in its queue, so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found = dict.fromkeys(PHASES, 0.0)
        self._last = self._now()
        self._laps: list[tuple[str, Any, Any]] = []  # that the accelerator may not have reached

    def lap(self, phase: str) -> None:
        """The time since the last lap was this phase's."""
        now = self._now()
        self._laps.append((phase, self._last, now))
        self._last = now
        while self._laps and (self._device.type != "cuda" or self._laps[0][2].query()):
            self._settle(*self._laps.pop(0))

    def seconds(self) -> dict[str, float]:
        """Waits for the accelerator."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        while self._laps:
            self._settle(*self._laps.pop(0))
        return dict(self._found)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def _settle(self, phase: str, begin: Any, end: Any) -> None:
        self._found[phase] += begin.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - begin
