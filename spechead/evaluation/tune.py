"""`spechead tune`: the static tree that suits a head, chosen on texts that its target wrote, and saved with the head.

Where a pass might begin in such a text, the head drafts while the text's own tokens are taken for its drafts. The ranks
that it gave them are the rank path of that place, and a static tree accepts as much of the path as it holds. What any
tree would yield is therefore known without decoding. Knows nothing of how a head drafts.

Legend: T tokens of a text, D draft vocabulary.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from spechead import metrics
from spechead.data.dataset import (
    Conversation,
    Sample,
    answers_of_other_models,
    build_samples,
    read_conversations,
    split_validation,
)
from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.decoding.generate import RANKED, Speculation, generate
from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Static, chain
from spechead.errors import UserError
from spechead.evaluation.aggregate import Comparison, suite_entry
from spechead.evaluation.measure import DEFAULT_PROMPTS, SIZES, Question, decode, encode_prompts, passes_by_size
from spechead.evaluation.options import ModelOptions
from spechead.files import shipped
from spechead.heads import Head
from spechead.heads.files import read_info, save_tree
from spechead.progress import Progress
from spechead.target.model import Target, TargetOutput
from spechead.training.recipe import DataConfig

CURRENT = "current"
WIDEST = 20  # children that a node may have
TIMED, TIMED_TOKENS = 4, 64  # texts that are decoded for what a pass costs, and tokens of each
OUTSIDE = -1  # the rank of a token that the head cannot draft

RankPath = tuple[int, ...]  # of the tokens behind a place, as far as the text goes and the head can draft it
Answer = list[RankPath]  # of every place of one answer but its last: a pass begins behind a token


@dataclass(kw_only=True)
class TuneOptions(ModelOptions):
    """Choose the static tree with which a head drafts fastest here, and save it with the head. For Medusa and Hydra;
    works for any head."""

    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} a line, that the target answers for this purpose. Not
    those that eval measures on."""
    data: str = ""
    """JSONL file of conversations whose answers the target wrote. With neither: what the head's training held out, or,
    where that data is not here, what the shipped recipes hold out; answered anew where another target wrote it."""
    limit: int = 16
    """Texts to use, at least 2; time grows with them."""
    nodes: int = 0
    """Drafts of the tree, fewer where no more would ever be accepted; 0: as many as the speed model says, from what
    passes cost on this machine."""
    depth: int = 6
    """Deepest draft."""
    save: bool = True
    """Save the tree with the head; if not, only show it."""

    def __post_init__(self) -> None:
        if not self.head:
            raise UserError("no head: give --head, the folder of a trained head")
        super().__post_init__()
        if self.prompts and self.data:
            raise UserError("prompts and data are both given: choose one")
        for name, least in (("limit", 2), ("nodes", 0), ("depth", 1), ("max_new_tokens", 2)):
            if getattr(self, name) < least:
                raise UserError(f"option {name}: must be at least {least}, got {getattr(self, name)}")
        if max(self.nodes, self.depth) > SIZES[-1]:
            raise UserError(f"options nodes and depth: at most {SIZES[-1]}")


@dataclass(frozen=True)
class Candidate:
    """A tree, and what it is expected to do."""

    name: str  # how it was chosen, or `CURRENT`
    plan: Plan
    tokens: float  # a pass, on texts that the tree was not chosen on
    speedup: float | None  # by the speed model; None where no costs were measured

    @property
    def merit(self) -> float:
        """What trees are compared by."""
        return self.tokens if self.speedup is None else self.speedup


def tune(options: TuneOptions) -> Candidate:
    """Choose a tree, show what it is chosen from, and save it. The weights are not touched."""
    check_prompts(options)
    target = options.load_target()
    head = options.load_head(target)
    texts = calibration_texts(options, target)
    answers = rank_paths(head, texts, options.depth)
    costs = None if options.nodes else measure_costs(head, texts, options.depth)
    current = candidate(CURRENT, head.tree, tokens_per_pass(accepted_now(head, texts)), costs)
    sizes = [options.nodes] if options.nodes else [size - 1 for size in SIZES if 1 < size <= target.max_positions]
    trees = [tree for name in METHODS for tree in best_trees(name, answers, sizes, options.depth, costs)]
    found = list({(tree.name, tree.plan): tree for tree in trees}.values())  # of few answers come small trees only
    best = max(found, key=lambda tree: tree.merit)
    show(head, [current, *found], best, len(texts), sum(map(len, answers)))
    if not options.nodes and current.merit >= best.merit:
        print(f"the current tree {current.plan} is no slower and stays; --nodes {best.plan.nodes} takes the other")
        return current
    if options.save:
        save_tree(Path(options.head), best.plan)
        print(f"saved with the head {options.head}")
    return best


# ------------------------------------------------------------------------------------------------ texts


def check_prompts(options: TuneOptions) -> None:
    """Refuse the prompts of the evaluation: its numbers would be those of a tree that was chosen on them."""
    if not options.prompts:
        return
    measured = {prompt.text for prompt in read_prompts(shipped(DEFAULT_PROMPTS))}
    common = sum(prompt.text in measured for prompt in read_prompts(Path(options.prompts)))
    if common:
        raise UserError(f"prompts {options.prompts}: eval measures on {common} of them; choose the tree on others")


def calibration_texts(options: TuneOptions, target: Target) -> list[Sample]:
    """Texts whose answers the target wrote, by itself (greedily) or now."""
    if options.prompts:
        return _answered(read_prompts(Path(options.prompts)), options, target)
    if options.data:
        conversations = read_conversations(options.data)
        texts = _samples(conversations, options, target)[: options.limit]
        if warning := answers_of_other_models([conversations[text.row] for text in texts], target.name):
            print(f"data: {warning}; the tree is chosen for texts that it may not write", file=sys.stderr)
        return texts
    data, seed = split_of(Path(options.head))
    conversations = read_conversations(data.sources(), data.limit)
    texts = _samples(conversations, options, target, data.max_length)
    held_out = split_validation(texts, data.validation_share, seed)[1][: options.limit]
    if not answers_of_other_models([conversations[text.row] for text in held_out], target.name):
        return held_out
    first = [next(m["content"] for m in conversations[t.row]["messages"] if m["role"] == "user") for t in held_out]
    return _answered([Prompt(number, "sample", text) for number, text in enumerate(first)], options, target)


def split_of(folder: Path) -> tuple[DataConfig, int]:
    """Data and seed of which some was held out when the head in `folder` was trained, or else of the shipped recipes.

    Tells on standard error where nothing sure was held out.
    """
    known = read_info(folder).data
    default, seed = DataConfig(), int(known.pop("seed", 0))
    data = DataConfig(**known)
    if data.validation_share and all(Path(source).is_file() for source in data.sources()):
        return data, seed
    if set(default.sources()) & set(data.sources()):
        print(
            f"warning: what {folder} learned from is not all here: the tree is chosen on conversations of which it "
            "learned from some; name others with --data or --prompts",
            file=sys.stderr,
        )
    return default, 0


def _samples(
    conversations: Sequence[Conversation], options: TuneOptions, target: Target, length: int = DataConfig.max_length
) -> list[Sample]:
    return build_samples(conversations, target.tokenizer, min(length, target.max_positions), options.template()).items


def _answered(prompts: Sequence[Prompt], options: TuneOptions, target: Target) -> list[Sample]:
    """The prompts with the target's own greedy answers, by the plain decoder."""
    asked = encode_prompts(balanced(prompts, options.limit), target, options)
    texts = []
    with Progress("the target answers", len(asked), "prompt") as progress:
        for number, question in enumerate(asked):
            ids = question.ids + generate(target, question.ids, max_new_tokens=question.max_new_tokens).tokens
            texts.append(Sample(torch.tensor(ids), torch.arange(len(ids)) >= len(question.ids), number))
            progress.advance()
    return texts


# ------------------------------------------------------------------------------------------------ rank paths


def rank_paths(head: Head, texts: Sequence[Sample], depth: int) -> list[Answer]:
    """Every place's ranks of the tokens behind it, down to `depth` or as deep as the head goes."""
    answers: list[Answer] = []
    with Progress("rank the target's tokens", len(texts), "text") as progress:
        for text in texts:
            for begin, end in answer_spans(text):
                answers.append([])
                for place, state, fresh, out in passes(head, text, begin, end):
                    ranks = TextAsDrafts(head, text.ids[place + 1 : end])
                    head.propose(state, fresh, out, chain(min(depth, end - place - 1)), ranks)
                    answers[-1].append(tuple(ranks.found))
            progress.advance()
    answers = [answer for answer in answers if answer]
    if len(answers) < 2:
        raise UserError(f"{len(answers)} answers of two tokens or more: at least 2 are needed to choose a tree")
    return answers


def answer_spans(text: Sample) -> list[tuple[int, int]]:
    """[begin, end) of every run of supervised tokens."""
    edges = torch.diff(text.supervised.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    begins, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return list(zip(begins, ends, strict=True))


@torch.no_grad()
def passes(head: Head, text: Sample, begin: int, end: int) -> Iterator[tuple[int, object, Tensor, TargetOutput]]:
    """A pass behind every token of an answer but the last: its place, and what `propose` is given there.

    Like decoding whose every draft fails; the answer's first token comes from the prefill.
    """
    ids = text.ids[:end].to(head.target.device)
    out = head.target.forward(ids[None], taps=head.taps)
    state, known = head.new_state(ids[: begin + 1]), 0  # rows that the head has seen
    for place in range(begin, end - 1):
        rows = torch.arange(known, place, device=ids.device)
        yield place, state, ids[known + 1 : place + 1], out.rows(rows)
        known = place


class TextAsDrafts(Drawing):
    """Draws what the text says, and notes the ranks that the drafter gave it, as far as the draft vocabulary has it."""

    def __init__(self, head: Head, coming: Tensor) -> None:
        super().__init__(temperature=1.0, random=SeededSource(0))
        ids, inside = head.to_draft(coming.to(head.target.device))
        self._coming = [id if known else OUTSIDE for id, known in zip(ids.tolist(), inside.tolist(), strict=True)]
        self.found: list[int] = []

    def draw(self, logp: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [1, D] -> [1, 1], [1, D]
        token = OUTSIDE
        if OUTSIDE not in self.found:
            token = self._coming[len(self.found)]
            self.found.append(OUTSIDE if token == OUTSIDE else _rank(logp[0], token))
        return torch.tensor([[max(token, 0)]], device=logp.device), torch.zeros_like(logp)  # nobody reads these


def _rank(logp: Tensor, token: int) -> int:  # [D]
    """From 0; of equals the first goes before."""
    return int((logp > logp[token]).sum() + (logp[:token] == logp[token]).sum())


def accepted_now(head: Head, texts: Sequence[Sample]) -> list[list[int]]:
    """How many drafts of the head's current tree would be accepted at each place of each answer."""
    found: list[list[int]] = []
    with Progress("draft the current tree", len(texts), "text") as progress:
        for text in texts:
            for begin, end in answer_spans(text):
                coming = text.ids.tolist()[:end]
                drafts = [
                    (place, head.propose(state, fresh, out, head.tree))
                    for place, state, fresh, out in passes(head, text, begin, end)
                ]
                found.append([_followed(tree.tokens, tree.parents, coming[place + 1 :]) for place, tree in drafts])
            progress.advance()
    return [each for each in found if each]


def _followed(tokens: Tensor, parents: Tensor, coming: Sequence[int]) -> int:
    """Depth of the deepest node whose path the text goes on with."""
    node, depth = 0, 0
    for number, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        if parent == node and number and depth < len(coming) and token == coming[depth]:
            node, depth = number, depth + 1
    return depth


# ------------------------------------------------------------------------------------------------ trees


def by_product(paths: Sequence[RankPath]) -> Callable[[RankPath], float]:
    """The value of a node as the product of the accuracies of the ranks on its path, each over all places that have a
    token so deep (Medusa, arXiv 2401.10774, section 2.3.3): as if depths were independent."""
    hits = Counter((depth, rank) for path in paths for depth, rank in enumerate(path))
    total = Counter(depth for path in paths for depth in range(len(path)))

    def value(node: RankPath) -> float:
        return float(np.prod([hits[step] / max(1, total[step[0]]) for step in enumerate(node)]))

    return value


def by_counts(paths: Sequence[RankPath]) -> Callable[[RankPath], float]:
    """The value of a node as the share of places where its whole path would be accepted. The sum of a tree's values is
    then the mean number of accepted drafts (Sequoia, arXiv 2402.12374, with measured paths in place of a rate for each
    rank)."""
    counts = Counter(path[:depth] for path in paths for depth in range(1, len(path) + 1))
    return lambda node: counts[node] / max(1, len(paths))


METHODS = {"product": by_product, "counts": by_counts}


def best_nodes(value: Callable[[RankPath], float], nodes: int, depth: int) -> list[RankPath]:
    """The nodes of the best tree, the most valuable first; those that are worth nothing are left out.

    A node is worth no more than its parent, so that each step may take the most valuable child of what is there: the
    first n nodes are the best tree of n. Of equals the shallower goes first, then the one of smaller ranks.
    """
    heap: list[tuple[float, int, RankPath]] = [(-value((rank,)), 1, (rank,)) for rank in range(WIDEST)]
    heapq.heapify(heap)
    chosen: list[RankPath] = []
    while heap and len(chosen) < nodes:
        worth, length, node = heapq.heappop(heap)
        if worth == 0:
            break
        chosen.append(node)
        for rank in range(WIDEST if length < depth else 0):
            child = (*node, rank)
            heapq.heappush(heap, (-value(child), length + 1, child))
    return chosen


def accepted(nodes: set[RankPath], path: RankPath) -> int:
    """How many drafts a static tree has accepted where the text goes on along `path`."""
    return sum(1 for _ in takewhile(lambda depth: path[:depth] in nodes, range(1, len(path) + 1)))


def tokens_per_pass(found: Sequence[Sequence[int]]) -> float:
    """tau of drafts accepted at each place, answer by answer: a pass begins where the last one ended."""
    tokens = begun = 0
    for answer in found:
        depth = torch.tensor(answer)  # [T]
        hits = torch.arange(max(answer) or 1)[:, None] < depth  # [K, T]
        added = metrics.walk(hits, torch.ones_like(depth, dtype=torch.bool))
        begun, tokens = begun + added[0], tokens + added[1]
    return tokens / begun


def best_trees(
    name: str, answers: Sequence[Answer], sizes: Sequence[int], depth: int, costs: Costs | None
) -> list[Candidate]:
    """The fastest tree of each of `sizes` drafts by one method, of all depths; without costs, that of most tokens a
    pass.

    Told is what trees chosen on one half of the answers do on the other; the tree itself is chosen on all of them.
    """
    halves = answers[::2], answers[1::2]
    values = [METHODS[name]([path for answer in part for path in answer]) for part in (answers, *halves)]
    found: dict[int, list[Candidate]] = {size: [] for size in sizes}
    for deepest in range(1, min(depth, max(len(path) for answer in answers for path in answer)) + 1):
        chosen, *others = (best_nodes(value, max(sizes), deepest) for value in values)
        if not chosen:
            raise UserError("the head drafts no token of these texts right: train it first, or give other texts")
        for size in sizes:  # the first n nodes are the best tree of n
            trees = [set(nodes[:size]) for nodes in others]
            judged = [
                [accepted(tree, path) for path in answer]
                for tree, half in zip(trees, halves[::-1], strict=True)
                for answer in half
            ]
            found[size].append(candidate(name, Static(tuple(chosen[:size])), tokens_per_pass(judged), costs))
    return [max(candidates, key=lambda tree: tree.merit) for candidates in found.values()]


# ------------------------------------------------------------------------------------------------ costs


@dataclass(frozen=True)
class Costs:
    """What a pass costs on this machine, in plain passes."""

    v: dict[int, float]  # verifying so many tokens, over verifying one
    plain_verify: float  # share of a plain pass that is verifying
    step: float  # drafting one level
    rest: float

    def speedup(self, tokens: float, plan: Plan) -> float:
        v = float(np.interp(plan.nodes + 1, list(self.v), list(self.v.values())))
        return metrics.predicted_speedup(tokens, v * self.plain_verify, plan.depth, self.step, self.rest)


def candidate(name: str, plan: Plan, tokens: float, costs: Costs | None) -> Candidate:
    return Candidate(name, plan, tokens, None if costs is None else costs.speedup(tokens, plan))


def measure_costs(head: Head, texts: Sequence[Sample], depth: int) -> Costs:
    """Decode a few of the texts again, plainly and with a chain in turns, and time passes over several tokens."""
    target = head.target
    asked = []
    for text in texts[:TIMED]:
        begin, _ = answer_spans(text)[0]
        room = min(TIMED_TOKENS, target.max_positions - begin)
        asked.append(Question(Prompt(text.row, "calibration", ""), text.ids[:begin].tolist(), room))
    speculation = Speculation(chain(depth))
    decode(target, asked[0].shortened())
    decode(target, asked[0].shortened(), head, speculation=speculation)
    pairs = []
    for question in asked:
        plain = decode(target, question, speculation=RANKED)
        pairs.append(Comparison(question.prompt, plain, decode(target, question, head, speculation=speculation)))
    found = suite_entry(pairs, {})["costs"]
    if found is None:
        raise UserError("every answer ended with its first token: nothing can be timed; give --nodes, or other texts")
    levels = median(level for pair in pairs for level in pair.speculative.stats.drafted)
    _, v = passes_by_size(target, asked, [pair.plain for pair in pairs])
    by_size = {int(size): cost for size, cost in v.items()}
    return Costs(by_size, found["plain_verify"], found["draft"] / max(1, levels), found["rest"])


# ------------------------------------------------------------------------------------------------ showing


def show(head: Head, found: Sequence[Candidate], best: Candidate, texts: int, places: int) -> None:
    """A line a tree. What goes on behind it is standard output's last line: the tree as `--tree` takes it."""
    print(f"{head.kind} head on {head.target.name}: {texts} texts, {places} places", file=sys.stderr)
    print("chosen by  drafts  depth  tokens/pass  predicted speed-up")
    for tree in found:
        times = "-" if tree.speedup is None else f"x{tree.speedup:.2f}"
        mark = "  <-" if tree is best else ""
        numbers = f"{tree.plan.nodes:>6}  {tree.plan.depth:>5}  {tree.tokens:>11.3f}  {times:>18}"
        print(f"{tree.name:<9}  {numbers}{mark}")
    print(f"the best static tree, by {best.name}: {best.plan}")
