"""One sequence while it is decoded: its tokens, its drafter's state, its statistics, and what ends it.

Legend: P prompt tokens, N nodes of the largest tree of a pass, n nodes of this sequence's tree, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing, Sampler
from spechead.decoding.timing import PHASES
from spechead.decoding.tree import Dynamic, Plan, Tree
from spechead.decoding.verify import RULES, Accepted, exact_match
from spechead.drafters.base import Drafter, is_chain
from spechead.errors import UserError
from spechead.options import Options, Range
from spechead.target.model import Target, TargetOutput

OnCommit = Callable[[list[int], int], None]


@dataclass
class Stats:
    """Statistics of one generation. The prefill, and the token drawn from it, are not counted as a pass."""

    passes: int = 0
    tokens: int = 0  # committed by passes, with the bonus tokens, without what lies after the end
    committed: list[int] = field(default_factory=list)  # tokens of each pass
    drafted: list[int] = field(default_factory=list)  # depth of the tree of each pass
    accepted: list[int] = field(default_factory=list)  # drafts accepted in each pass, also those after the end
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # of the whole batch


@dataclass
class Generation:
    """The result of decoding one sequence."""

    tokens: list[int]  # new tokens; the end-of-sequence token is the last where one was drawn
    finish_reason: str  # "eos", "stop" or "length"
    stats: Stats
    gaps: list[float]  # difference of the two best logits where each token was drawn; empty without keep_gaps


@dataclass
class Speculation(Options):
    """How drafts are made and verified; by default they are ranked, and verified by exact match.

    Raises UserError where the rule is unknown, or does not fit the drafts or the tree.
    """

    tree: Plan | None = None  # None: the drafter's own
    rule: str = ""  # one of verify.RULES; empty: exact_match, or rejection where drafts are sampled
    draft_temperature: Annotated[float, Range(0)] = 0.0  # above 0, drafts are sampled

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = self.rule or ("rejection" if self.draft_temperature else "exact_match")
        if self.rule not in RULES:
            raise UserError(f"option rule: must be one of {', '.join(RULES)}, got {self.rule!r}")
        if RULES[self.rule].sampled and not self.draft_temperature:
            raise UserError(f"option rule: {self.rule} needs sampled drafts; set draft_temperature above 0")
        if self.rule == "block" and self.tree is not None and not is_chain(self.tree):
            chain = f"chain:{self.tree.depth}"
            raise UserError(f"option rule: block needs a chain, not {self.tree}; use {chain} or the rule rejection")
        if self.draft_temperature and isinstance(self.tree, Dynamic):
            raise UserError(f"option tree: {self.tree} cannot sample its drafts; use a chain or a static tree")


class ActiveSequence:
    """One sequence of the batch. It ends with the first of an end-of-sequence token, a stop string and the cap."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int] | Tensor,
        sampler: Sampler,
        speculation: Speculation,
        max_new_tokens: int,
        stop: Sequence[str],
        keep_gaps: bool,
    ) -> None:
        prompt = _token_ids(target, prompt)
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
        self._random = SeededSource(sampler.seed)
        self._stop, self._keep_gaps = [text for text in stop if text], keep_gaps

    @property
    def length(self) -> int:
        """Tokens of prompt and text so far."""
        return self._prompt + len(self.tokens)

    @property
    def ids(self) -> Tensor:
        """int64 [length]: prompt and text so far."""
        return self._ids[: self.length]

    def begin(self, out: TargetOutput, logits: Tensor, drafter: Drafter | None) -> None:
        """Draw the first token from the prefill's last logits [1, V]; `out` [1, P, ...] is the prompt's."""
        self._target.check_finite(out.hidden, logits)
        logits = self._sampler.processed(logits, Tree.root(self.ids[-1:]), self.ids)
        first = self._sampler.draw(logits, [self.length])  # [1]
        self.gaps += _gaps(logits, [0]) if self._keep_gaps else []
        self._state = drafter.new_state(self.ids) if drafter else None
        self._fresh, self._out = torch.cat([self.ids[1:], first]), out  # [P], [1, P, ...]
        self._append(first.tolist(), first, 0)

    def propose(self, drafter: Drafter | None) -> Tree:
        """The drafter's tree, without drafts beyond the cap, nor from one side of the rotary border to the other."""
        plan = self._speculation.tree
        room = self.cap - len(self.tokens) - 1  # for drafts, one token being the bonus
        if drafter is None or plan is None or room < 1:
            return Tree.root(self._fresh[-1:])
        border = self._target.rotary_border
        if border is not None and self.length <= border:
            room = min(room, border - self.length)
        temperature = self._speculation.draft_temperature
        drawing = Drawing(temperature, self._random) if temperature else None
        plan = plan.limited(max(room, 1))  # without room the drafter still has to read the fresh tokens
        return drafter.propose(self._state, self._fresh, self._out, plan, drawing).pruned(room)

    def accept(self, tree: Tree, logits: Tensor, hidden: Tensor) -> Accepted:
        """The drafts to accept, given the target's logits [N, V] and final hidden states [N, H], those of the tree's n
        nodes first."""
        raw, hidden = logits[: len(tree)], hidden[: len(tree)]
        logits = self._sampler.processed(raw, tree, self.ids)  # [n, V]
        if self._speculation.rule == "exact_match":
            deepest = min(self._speculation.tree.depth if self._speculation.tree else 0, len(tree) - 1)
            places = range(self.length, self.length + deepest + 1)
            drawn = self._sampler.draw(logits, places, tree.depths)  # [n]; NaN and infinity are drawn before all others
            result = exact_match(tree, drawn)
            self._check_finite(raw.gather(1, drawn[:, None]), hidden, raw)
        else:
            self._check_finite(raw.amax(-1), hidden, raw)
            rule = RULES[self._speculation.rule].function
            result = rule(tree, self._sampler.probabilities(logits), self._random)
        self.gaps += _gaps(logits, result.path) if self._keep_gaps else []
        self.stats.drafted.append(tree.depth)  # the rule has already waited for the device
        self.stats.accepted.append(len(result.path) - 1)
        return result

    def commit(self, result: Accepted, nodes: TargetOutput) -> None:
        """Append the tokens of the pass; the next draft is made from the target's output [1, N, ...] at the path."""
        self._fresh = torch.tensor(result.tokens, device=self._ids.device)
        if self._speculation.tree is not None:  # plain decoding has no use for it
            self._out = nodes.rows(torch.tensor(result.path, device=self._ids.device))
        new = self._append(result.tokens, self._fresh, len(result.path) - 1)
        self.stats.passes += 1
        self.stats.tokens += new
        self.stats.committed.append(new)

    def _check_finite(self, largest: Tensor, hidden: Tensor, logits: Tensor) -> None:
        """Raise UserError where the largest logits are not finite, which shows without a look at all of them."""
        if not largest.isfinite().all():
            self._target.check_finite(hidden, logits)

    def _append(self, tokens: list[int], ids: Tensor, accepted: int) -> int:
        """Append `tokens`, which `ids` has on the device, up to the first end; returns how many were appended."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in self._target.eos_ids:
                self.finish_reason = "eos"
            elif self._stop and self._ends_with_stop():
                self.finish_reason = "stop"
            elif len(self.tokens) == self.cap:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        new = self.tokens[before:]
        self._ids[self.length - len(new) : self.length] = ids[: len(new)]
        if self.on_commit:
            self.on_commit(new, min(accepted, len(new)))
        if self.finish_reason:
            del self._state, self._out  # the batch may go on for long without this sequence
        return len(new)

    def generation(self, seconds: dict[str, float]) -> Generation:
        """The result; `seconds`: those of the batch by phase."""
        self.stats.seconds = dict(seconds)
        return Generation(self.tokens, self.finish_reason, self.stats, self.gaps[: len(self.tokens)])

    def _ends_with_stop(self) -> bool:
        """Whether a stop string ends in the newest token; it may have begun up to its own length of tokens before."""
        reach = 1 + max(len(text.encode()) for text in self._stop)
        tail = self._target.tokenizer.decode(self.tokens[-reach:], skip_special_tokens=False)
        return any(text in tail for text in self._stop)


def _token_ids(target: Target, prompt: Sequence[int] | Tensor) -> list[int]:
    """The prompt as a list. Raises UserError where it is no sequence of ids that the target has embeddings for."""
    try:
        ids = [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        raise UserError("a prompt must be a sequence of token ids, such as [5, 7, 9] or a tensor [P]") from None
    unknown = sorted({token for token in ids if not 0 <= token < target.vocab_size})
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise UserError(
            f"the prompt has token ids {', '.join(map(str, unknown[:5]))}{more}, but the embedding of target "
            f"{target.name!r} has {target.vocab_size} rows; its tokenizer may be that of another model"
        )
    return ids


def _cap(target: Target, prompt: int, max_new_tokens: int) -> int:
    """The number of new tokens that the target has positions for, at most `max_new_tokens`."""
    if prompt == 0:
        raise UserError("the prompt is empty; decoding needs at least one token")
    if max_new_tokens < 1:
        raise UserError(f"option max_new_tokens: must be at least 1, got {max_new_tokens}")
    if prompt >= target.max_positions:
        raise UserError(f"the prompt has {prompt} tokens, but target {target.name!r} has {target.positions_text}")
    return min(max_new_tokens, target.max_positions - prompt)


def _gaps(logits: Tensor, path: Sequence[int]) -> list[float]:
    best = logits[list(path)].topk(2, -1).values  # [n, 2]
    return (best[:, 0] - best[:, 1]).tolist()
