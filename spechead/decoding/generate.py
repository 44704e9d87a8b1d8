"""The decode loop: draft, verify, accept, keep. Plain decoding is the same loop without a drafter.

Several texts may be decoded side by side: each has its own drafts, its own draws and its own end, and comes out as it
would alone. Knows nothing of how drafts are made, of templates or of files.

Legend: B texts still being written, P prompt tokens, N nodes of the largest tree, n nodes of one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.decoding.sampling import Sampler
from spechead.decoding.sequence import PHASES, Generation, OnCommit, Speculation, Stats, Text
from spechead.decoding.timing import Mark, elapsed, mark, reached
from spechead.decoding.tree import Tree
from spechead.drafters.base import Drafter
from spechead.target.cache import KVCache
from spechead.target.model import Target

__all__ = ["Generation", "OnCommit", "Speculation", "Stats", "generate", "generate_batch"]

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
    if drafter is None or speculation.tree is None:
        speculation = replace(speculation, tree=drafter.tree if drafter else None)
    clock = _Clock(target.device)
    texts = [
        Text(target, prompt, sampler, speculation, max_new_tokens, stop, keep_gaps)
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
        inputs = _inputs(target, trees, alive)
        clock.lap("other")
        nodes = target.forward(**inputs, taps=drafter.taps if drafter else (), cache=cache)
        logits = target.logits(nodes.hidden)  # [B, N, V]
        clock.lap("verify")
        results = [text.judge(tree, own) for text, tree, own in zip(alive, trees, logits, strict=True)]
        clock.lap("judge")
        cache.keep([result.path for result in results], width)
        for b, (text, result) in enumerate(zip(alive, results, strict=True)):
            text.take(result, nodes.row(b))
        clock.lap("commit")
        for text, result in zip(alive, results, strict=True):
            text.append(result.tokens, len(result.path) - 1)
        clock.lap("other")
    return [text.generation(clock.seconds()) for text in texts]


def _prefill(target: Target, texts: Sequence[Text], drafter: Drafter | None, cache: KVCache) -> None:
    """Read the prompts, padded on the right, and draw the first token of each."""
    lengths = [len(text.ids) for text in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.long, device=target.device)  # [B, P]
    for b, text in enumerate(texts):
        ids[b, : lengths[b]] = text.ids
    out = target.forward(ids, taps=drafter.taps if drafter else (), cache=cache)
    cache.settle(lengths)
    for b, text in enumerate(texts):
        rows = out.row(b, lengths[b])
        logits = target.logits(rows.hidden[0, -1:])  # [1, V]
        text.begin(rows, logits, drafter)


def _inputs(target: Target, trees: Sequence[Tree], texts: Sequence[Text]) -> dict[str, Any]:
    """What the target is given to run one tree of each text; smaller trees are padded with nodes that nobody sees."""
    width = max(map(len, trees))
    if width == 1:
        return {"ids": torch.stack([tree.tokens for tree in trees])}
    lengths = [text.length - 1 for text in texts]  # the roots are not in the cache yet
    past: Tensor | int = lengths[0]  # a number of the host, where one serves all
    if len(set(lengths)) > 1:
        past = torch.tensor(lengths, device=target.device)[:, None]  # [B, 1]
    tokens = torch.stack([F.pad(tree.tokens, (0, width - len(tree))) for tree in trees])  # [B, N]
    depths = torch.stack([F.pad(tree.depths, (0, width - len(tree))) for tree in trees])  # [B, N]
    visible = torch.stack([_padded(tree.visible, width) for tree in trees])  # [B, N, N]
    return {"ids": tokens, "positions": past + depths, "visible": visible}


def _padded(visible: Tensor, width: int) -> Tensor:  # bool [n, n] -> [N, N]
    missing = width - visible.shape[0]
    if not missing:
        return visible
    padded = F.pad(visible, (0, missing, 0, missing))
    padded.diagonal()[-missing:] = True  # no row may be empty
    return padded


def _still_written(texts: list[Text], cache: KVCache) -> list[Text]:
    """The texts that have not ended; the others leave the cache, too."""
    alive = [b for b, text in enumerate(texts) if not text.finish_reason]
    if 0 < len(alive) < len(texts):
        cache.select(torch.tensor(alive, device=cache.layers[-1].device))
    return [texts[b] for b in alive]


class _Clock:
    """Seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found = dict.fromkeys(PHASES, 0.0)
        self._last = mark(device)
        self._laps: list[tuple[str, Mark, Mark]] = []  # that an accelerator may not have reached

    def lap(self, phase: str) -> None:
        """The time since the last lap was this phase's."""
        now = mark(self._device)
        self._laps.append((phase, self._last, now))
        self._last = now
        while self._laps and reached(self._laps[0][2]):
            self._settle(*self._laps.pop(0))

    def seconds(self) -> dict[str, float]:
        """Waits for an accelerator."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        while self._laps:
            self._settle(*self._laps.pop(0))
        return dict(self._found)

    def _settle(self, phase: str, begin: Mark, end: Mark) -> None:
        self._found[phase] += elapsed(begin, end)
