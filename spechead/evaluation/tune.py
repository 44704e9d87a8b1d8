"""`spechead tune`: choose the static tree that suits a head, on texts that its target wrote, and save it with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from spechead.data.dataset import Sample, answers_of_other_models
from spechead.data.preparation.prepare import prepare
from spechead.data.preparation.prepared import PreparedSamples, split_validation
from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.evaluation.aggregate import Comparison, suite_entry
from spechead.evaluation.measure import DEFAULT_PROMPTS, SIZES, Question, decode, encode_prompts, passes_by_size
from spechead.evaluation.options import ModelOptions
from spechead.evaluation.rank_paths import accepted_by_own_tree, answer_spans, rank_paths
from spechead.evaluation.tree_search import METHODS, Candidate, Costs, best_trees, candidate, tokens_per_pass
from spechead.files import shipped
from spechead.heads import Head
from spechead.heads.files import HeadInfo, save_tree
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.model import Target
from spechead.training.build import preparation_of
from spechead.training.recipe import DataConfig

TIMED, TIMED_TOKENS = 4, 64  # texts that are decoded to measure the costs of a pass, and tokens of each


@dataclass(kw_only=True)
class TuneOptions(ModelOptions):
    """Choose the static tree with which a head drafts fastest on this machine, and save it with the head."""

    max_new_tokens: Annotated[int, Range(2)] = 256
    """Longest answer to a prompt, in tokens."""
    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} per line, for the target to answer. Not those that
    eval measures on."""
    data: str = ""
    """JSONL file of conversations whose answers the target wrote. Without prompts and data: the conversations that the
    head's training held out or, if they are missing, those that the shipped recipes hold out; another target answers
    them anew."""
    limit: Annotated[int, Range(2)] = 16
    """Texts to use; time grows with them."""
    nodes: Annotated[int, Range(0, most=SIZES[-1])] = 0
    """Drafts of the tree, fewer where no more would be accepted; 0: as many as are fastest by the speed model and the
    costs of a pass on this machine."""
    depth: Annotated[int, Range(1, most=SIZES[-1])] = 6
    """Deepest draft."""
    save: bool = True
    """Save the tree with the head; --no-save only prints it."""

    def __post_init__(self) -> None:
        if not self.head:
            raise UserError("option head: is empty, give the folder of a trained head")
        super().__post_init__()
        if self.prompts and self.data:
            raise UserError("option data: cannot be combined with prompts, choose one")


def tune(options: TuneOptions) -> Candidate:
    """Choose a tree, print the candidates, and save the tree. The weights are not touched."""
    check_prompts(options)
    target = options.load_target()
    head = options.load_head(target)
    texts = calibration_texts(options, target)
    answers = rank_paths(head, texts, options.depth)
    costs = None if options.nodes else measure_costs(head, texts, options.depth)
    current = candidate("current", head.tree, tokens_per_pass(accepted_by_own_tree(head, texts)), costs)
    sizes = [options.nodes] if options.nodes else [size - 1 for size in SIZES if 1 < size <= target.max_positions]
    trees = [tree for name in METHODS for tree in best_trees(name, answers, sizes, options.depth, costs)]
    trees = list({(tree.name, tree.plan): tree for tree in trees}.values())  # few answers yield small trees only
    best = max(trees, key=lambda tree: tree.merit)
    print(f"{head.kind} head on {target.name}: {len(texts)} texts, {sum(map(len, answers))} positions", file=sys.stderr)
    print_candidates([current, *trees], best)
    if not options.nodes and current.merit >= best.merit:
        print(f"the current tree {current.plan} is no slower and stays; --nodes {best.plan.nodes} takes the other")
        return current
    if options.save:
        save_tree(Path(options.head), best.plan)
        print(f"saved with the head {options.head}")
    return best


def print_candidates(trees: Sequence[Candidate], best: Candidate) -> None:
    """A line per tree on standard output; the last line is the best tree in the form of --tree."""
    print("chosen by  drafts  depth  tokens/pass  predicted speed-up")
    for tree in trees:
        speedup = "-" if tree.speedup is None else f"x{tree.speedup:.2f}"
        mark = "  <-" if tree is best else ""
        numbers = f"{tree.plan.nodes:>6}  {tree.plan.depth:>5}  {tree.tokens:>11.3f}  {speedup:>18}"
        print(f"{tree.name:<9}  {numbers}{mark}")
    print(f"the best static tree, by {best.name}: {best.plan}")


# ------------------------------------------------------------------------------------------------ texts


def check_prompts(options: TuneOptions) -> None:
    """Refuse the prompts of the evaluation: it would measure a tree on the prompts that the tree was chosen on."""
    if not options.prompts:
        return
    measured = {prompt.text for prompt in read_prompts(shipped(DEFAULT_PROMPTS))}
    common = sum(prompt.text in measured for prompt in read_prompts(Path(options.prompts)))
    if common:
        raise UserError(f"option prompts: eval measures on {common} of {options.prompts}, choose the tree on others")


def calibration_texts(options: TuneOptions, target: Target) -> Sequence[Sample]:
    """Texts whose answers the target wrote, earlier or now (greedily)."""
    if options.prompts:
        prompts = balanced(read_prompts(Path(options.prompts)), options.limit)
        return _answer(encode_prompts(prompts, target, options), target)
    if options.data:
        texts = _chats(_samples(DataConfig(train=[options.data]), target))[: options.limit]
        if warning := answers_of_other_models(texts.written_by(), target.name):
            print(f"data: {warning}; the target may not write such texts", file=sys.stderr)
        return texts
    data, seed = held_out_split(options.head_info())
    held_out = _chats(split_validation(_samples(data, target, seed), data.validation_share, seed)[1])[: options.limit]
    if not answers_of_other_models(held_out.written_by(), target.name):
        return held_out
    return _answer([_question(text, options.max_new_tokens, target) for text in held_out], target)


def held_out_split(info: HeadInfo) -> tuple[DataConfig, int]:
    """Data and seed of the split from which a head's training held out conversations, else of the shipped recipes.

    Warns on standard error if the head may have been trained on the latter.
    """
    known = info.data
    default, seed = DataConfig(), int(known.pop("seed", 0))
    data = DataConfig(**known)
    if data.validation_share and all(Path(source).exists() for source in data.sources()):
        return data, seed
    if set(default.sources()) & set(data.sources()):
        print(
            f"warning: training data of {info.folder} is missing: the tree is chosen on conversations some of which "
            "the head was trained on; name others with --data or --prompts",
            file=sys.stderr,
        )
    return default, 0


def _samples(data: DataConfig, target: Target, seed: int = 0) -> PreparedSamples:
    return prepare(preparation_of(data, target, seed)).samples


def _chats(samples: PreparedSamples) -> PreparedSamples:
    """The samples that begin with a prompt; plain documents do not."""
    chats = samples.take(~samples.data.supervised[samples.table["start"]])
    if not chats:
        raise UserError("option data: the data are documents, a tree is chosen on chats; name others, or give prompts")
    return chats


def _question(text: Sample, max_new_tokens: int, target: Target) -> Question:
    """The prompt of a text's first answer."""
    begin, _ = answer_spans(text)[0]
    room = min(max_new_tokens, target.max_positions - begin)
    return Question(Prompt(text.row, "calibration", ""), text.ids[:begin].tolist(), room)


def _answer(questions: Sequence[Question], target: Target) -> list[Sample]:
    """The prompts with the target's own greedy answers."""
    texts = []
    with Progress("the target answers", len(questions), "prompt") as progress:
        for number, question in enumerate(questions):
            ids = question.ids + generate(target, question.ids, max_new_tokens=question.max_new_tokens).tokens
            texts.append(Sample(torch.tensor(ids), torch.arange(len(ids)) >= len(question.ids), number))
            progress.advance()
    return texts


# ------------------------------------------------------------------------------------------------ costs


def measure_costs(head: Head, texts: Sequence[Sample], depth: int) -> Costs:
    """Decode a few of the texts again, plainly and with a chain interleaved, and time passes over several tokens."""
    target = head.target
    questions = [_question(text, TIMED_TOKENS, target) for text in texts[:TIMED]]
    speculation = Speculation(chain(depth))
    decode(target, questions[0].shortened())
    decode(target, questions[0].shortened(), head, speculation=speculation)
    pairs = []
    for question in questions:
        plain = decode(target, question)
        pairs.append(Comparison(question.prompt, plain, decode(target, question, head, speculation=speculation)))
    costs = suite_entry(pairs, {})["costs"]
    if costs is None:
        raise UserError("option nodes: give it; every answer ended with its first token, so that nothing can be timed")
    levels = median(level for pair in pairs for level in pair.speculative.stats.drafted)
    _, v = passes_by_size(target, questions, [pair.plain for pair in pairs])
    by_size = {int(size): cost for size, cost in v.items()}
    return Costs(by_size, costs["plain_verify"], costs["draft"] / max(1, levels), costs["rest"])
