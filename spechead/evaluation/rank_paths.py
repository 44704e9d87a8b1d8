"""How a head ranks the tokens of texts that its target wrote: what any tree would accept, known without decoding.

At each position where a pass might begin, the head drafts a chain whose drafts are forced to be the text's own tokens.
The ranks that it gives them are the position's rank path; a static tree accepts as much of the path as it contains.

Legend: T tokens of a text, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spechead.data.dataset import Sample
from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.heads import Head
from spechead.progress import Progress
from spechead.target.model import TargetOutput

OUTSIDE = -1  # the rank of a token outside the draft vocabulary

RankPath = tuple[int, ...]  # ranks of the tokens after a position, as far as the text goes and the head can draft it
Answer = list[RankPath]  # of every position of an answer but its last


def rank_paths(head: Head, texts: Sequence[Sample], depth: int) -> list[Answer]:
    """The rank path of every position of every answer, down to `depth` or as deep as the head drafts."""
    answers: list[Answer] = []
    with Progress("rank the target's tokens", len(texts), "text") as progress:
        for text in texts:
            for begin, end in answer_spans(text):
                answers.append([])
                for position, state, fresh, out in passes(head, text, begin, end):
                    forced = ForcedTokens(head, text.ids[position + 1 : end])
                    head.propose(state, fresh, out, chain(min(depth, end - position - 1)), forced)
                    answers[-1].append(tuple(forced.ranks))
            progress.advance()
    answers = [answer for answer in answers if answer]
    if len(answers) < 2:
        raise UserError(f"option data: {len(answers)} answers of two tokens or more, a tree needs at least 2")
    return answers


def accepted_by_own_tree(head: Head, texts: Sequence[Sample]) -> list[list[int]]:
    """How many drafts of the head's current tree would be accepted at each position of each answer."""
    answers: list[list[int]] = []
    with Progress("draft the current tree", len(texts), "text") as progress:
        for text in texts:
            ids = text.ids.tolist()
            for begin, end in answer_spans(text):
                answers.append([])
                for position, state, fresh, out in passes(head, text, begin, end):
                    tree = head.propose(state, fresh, out, head.tree)
                    answers[-1].append(_accepted_depth(tree.tokens, tree.parents, ids[position + 1 : end]))
            progress.advance()
    return [answer for answer in answers if answer]


def answer_spans(text: Sample) -> list[tuple[int, int]]:
    """[begin, end) of every run of supervised tokens."""
    edges = torch.diff(text.supervised.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    begins, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return list(zip(begins, ends, strict=True))


@torch.no_grad()
def passes(head: Head, text: Sample, begin: int, end: int) -> Iterator[tuple[int, object, Tensor, TargetOutput]]:
    """A pass at every token of an answer but the last: its position, and the arguments of `propose` there.

    As in a decoding whose every draft is rejected; the answer's first token comes from the prefill.
    """
    ids = text.ids[:end].to(head.target.device)
    out = head.target.forward(ids[None], taps=head.taps)
    state, seen = head.new_state(ids[: begin + 1]), 0  # rows of `out` that the head has seen
    for position in range(begin, end - 1):
        rows = torch.arange(seen, position, device=ids.device)
        yield position, state, ids[seen + 1 : position + 1], out.rows(rows)
        seen = position


class ForcedTokens(Drawing):
    """Makes a head draft given tokens instead of sampling, and records the ranks that it gives them.

    Once a token is outside the draft vocabulary, the path ends.
    """

    def __init__(self, head: Head, tokens: Tensor) -> None:
        super().__init__(1.0, SeededSource(0))
        ids, inside = head.to_draft(tokens.to(head.target.device))
        self._forced = [id if known else OUTSIDE for id, known in zip(ids.tolist(), inside.tolist(), strict=True)]
        self.ranks: list[int] = []

    def draw(self, logp: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [1, D] -> [1, 1], [1, D]
        token = OUTSIDE
        if OUTSIDE not in self.ranks:
            token = self._forced[len(self.ranks)]
            self.ranks.append(OUTSIDE if token == OUTSIDE else _rank(logp[0], token))
        return torch.tensor([[max(token, 0)]], device=logp.device), torch.zeros_like(logp)  # no rule reads these


def _rank(logp: Tensor, token: int) -> int:  # [D]
    """From 0; of equally probable tokens the first ranks higher."""
    return int((logp > logp[token]).sum() + (logp[:token] == logp[token]).sum())


def _accepted_depth(tokens: Tensor, parents: Tensor, continuation: Sequence[int]) -> int:
    """Depth of the deepest node of a tree whose path the text continues with."""
    node, depth = 0, 0
    for number, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        if parent == node and number and depth < len(continuation) and token == continuation[depth]:
            node, depth = number, depth + 1
    return depth
