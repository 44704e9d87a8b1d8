"""The decode loop: propose, verify, accept, keep, commit. Plain decoding is the same loop without a drafter.

Several sequences may be decoded in one batch: each has its own drafts, random numbers and end, and comes out as it
would alone.

Legend: B sequences not yet finished, P prompt tokens, N nodes of the largest tree, n nodes of one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.decoding.sampling import Sampler
from spechead.decoding.sequence import ActiveSequence, Generation, OnCommit, Speculation, Stats
from spechead.decoding.timing import PhaseTimer, phase
from spechead.decoding.tree import Tree
from spechead.decoding.verify import Accepted
from spechead.drafters.base import Drafter
from spechead.errors import UserError
from spechead.target.cache import KVCache
from spechead.target.model import Target, TargetOutput

__all__ = ["Generation", "OnCommit", "Speculation", "Stats", "generate", "generate_batch"]

RANKED = Speculation()


def generate(
    target: Target,
    prompt: Sequence[int] | Tensor,
    drafter: Drafter | None = None,
    *,
    speculation: Speculation = RANKED,
    max_new_tokens: int = 256,
    sampler: Sampler | None = None,
    stop: Sequence[str] = (),
    on_commit: OnCommit | None = None,
    keep_gaps: bool = False,
) -> Generation:
    """Decode after `prompt` until an end-of-sequence token, a stop string or `max_new_tokens`.

    Without `drafter` this is plain decoding, without `sampler` greedy. `on_commit(tokens, accepted)` is called after
    the prefill with the first token and 0, then after each pass with its tokens, of which the first `accepted` were
    drafts. Raises UserError where the prompt, a sequence or tensor of token ids [P], is empty, longer than the target's
    positions or has ids without an embedding, and where the target computes values that are not finite.
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
    prompts: Sequence[Sequence[int] | Tensor],
    drafter: Drafter | None = None,
    *,
    speculation: Speculation = RANKED,
    max_new_tokens: int = 256,
    samplers: Sequence[Sampler] | None = None,
    stop: Sequence[str] = (),
    on_commit: Callable[[int, list[int], int], None] | None = None,
    keep_gaps: bool = False,
) -> list[Generation]:
    """`generate` for several prompts at once; each sequence is what it would be alone.

    `samplers`: one for each prompt (default: greedy). `on_commit` gets the index of the prompt as its first argument.
    The seconds of each `Stats` are those of the whole batch.
    """
    if drafter is None or speculation.tree is None:
        speculation = replace(speculation, tree=drafter.tree if drafter else None)
    if len(prompts) == 0:
        raise UserError("no prompts; decoding needs at least one")
    timer = PhaseTimer(target.device)
    sequences = [
        ActiveSequence(target, prompt, sampler, speculation, max_new_tokens, stop, keep_gaps)
        for prompt, sampler in zip(prompts, samplers or [Sampler() for _ in prompts], strict=True)
    ]
    if on_commit is not None:
        for index, sequence in enumerate(sequences):
            sequence.on_commit = partial(on_commit, index)
    batch = _Batch(target, drafter, sequences, timer)
    batch.prefill()
    while batch.active:
        trees = batch.propose()
        verified = batch.verify(trees)
        accepted = batch.accept(trees, verified)
        batch.keep(accepted)
        batch.commit(accepted, verified)
    seconds = timer.seconds()
    return [sequence.generation(seconds) for sequence in sequences]


@dataclass
class _Verified:
    """The target's output at the nodes of all trees."""

    nodes: TargetOutput  # [B, N, ...]
    logits: Tensor  # [B, N, V]


class _Batch:
    """The sequences that are decoded together, with a method for each step of the loop."""

    def __init__(
        self, target: Target, drafter: Drafter | None, sequences: Sequence[ActiveSequence], timer: PhaseTimer
    ) -> None:
        self.active = list(sequences)
        self.timer = timer
        self._target, self._drafter = target, drafter
        self._taps = drafter.taps if drafter else ()
        self._cache = KVCache()
        self._past = 0  # columns of the cache before the trees of this pass

    @phase("prefill")
    def prefill(self) -> None:
        """Run the prompts, padded on the right, and draw the first token of each sequence."""
        lengths = [sequence.length for sequence in self.active]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long, device=self._target.device)  # [B, P]
        for row, sequence in enumerate(self.active):
            ids[row, : lengths[row]] = sequence.ids
        last = torch.tensor(lengths, device=ids.device)[:, None] - 1  # [B, 1]
        positions = torch.arange(ids.shape[1], device=ids.device).minimum(last)  # [B, P]; none beyond its own text
        out = self._target.forward(ids, taps=self._taps, cache=self._cache, positions=positions)
        self._cache.set_lengths(lengths)
        for row, sequence in enumerate(self.active):
            prompt = out.row(row, lengths[row])
            sequence.begin(prompt, self._target.logits(prompt.hidden[0, -1:]), self._drafter)
        self._drop_finished()

    @phase("draft")
    def propose(self) -> list[Tree]:
        """A tree of drafts for each sequence."""
        return [sequence.propose(self._drafter) for sequence in self.active]

    @phase("verify")
    def verify(self, trees: Sequence[Tree]) -> _Verified:
        """Run the target once over all trees."""
        self._reread()
        self._past = self._cache.length
        inputs = _inputs(self._target, trees, self.active)
        nodes = self._target.forward(**inputs, taps=self._taps, cache=self._cache)
        return _Verified(nodes, self._target.logits(nodes.hidden))

    @phase("accept")
    def accept(self, trees: Sequence[Tree], verified: _Verified) -> list[Accepted]:
        """The accepted path of each tree, and the tokens to commit."""
        rows = zip(self.active, trees, verified.logits, verified.nodes.hidden, strict=True)
        return [sequence.accept(tree, logits, hidden) for sequence, tree, logits, hidden in rows]

    @phase("keep")
    def keep(self, accepted: Sequence[Accepted]) -> None:
        """Keep the accepted paths in the cache, and drop all other drafts."""
        self._cache.keep([result.path for result in accepted], self._past)

    @phase("commit")
    def commit(self, accepted: Sequence[Accepted], verified: _Verified) -> None:
        """Append the tokens to their sequences; those that have finished leave the batch."""
        for row, (sequence, result) in enumerate(zip(self.active, accepted, strict=True)):
            sequence.commit(result, verified.nodes.row(row))
        self._drop_finished()

    def _reread(self) -> None:
        """Read the texts again whose rotary positions change, as a whole, with the token that comes next."""
        for row, sequence in enumerate(self.active):
            if self._target.outgrows(sequence.length - 1, sequence.length):
                self._target.reread(self._cache, row, sequence.ids)

    def _drop_finished(self) -> None:
        rows = [row for row, sequence in enumerate(self.active) if not sequence.finish_reason]
        if 0 < len(rows) < len(self.active):
            self._cache.select(torch.tensor(rows, device=self._target.device))
        self.active = [self.active[row] for row in rows]


def _inputs(target: Target, trees: Sequence[Tree], sequences: Sequence[ActiveSequence]) -> dict[str, Any]:
    """The arguments of the target's forward for a tree of each sequence; smaller trees are padded with nodes that no
    other node sees."""
    width = max(map(len, trees))
    if width == 1:
        return {"ids": torch.stack([tree.tokens for tree in trees])}
    lengths = [sequence.length - 1 for sequence in sequences]  # the roots are not in the cache yet
    past: Tensor | int = lengths[0]  # a number on the host where all lengths are equal
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
