"""How fast decoding is here: our decoder beside transformers' generate, both of them plain and with drafts.

    python eval/bench_decode.py --head runs/eagle3-smollm2/head --tree chain:3 --tree chain:5 --json bench.json

Every decoder writes the answer to every prompt, greedily, on one model object and after a warm-up; the order in which
they take turns is rotated from prompt to prompt. Seconds are those of the whole answer, prefill included. A ratio is
formed on each prompt and the median over the prompts is told, so that a disturbed run does not move it. Every text is
compared with plain decoding's. Knows nothing of how a drafter drafts.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spechead import __version__, chat, metrics
from spechead.cli import one_line_errors
from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.named import parse_drafter
from spechead.embedded import NAME as EMBEDDED
from spechead.errors import UserError
from spechead.evaluate import describe_machine, verify_costs
from spechead.files import make_folder, shipped, write_json
from spechead.formats.native import head_target, head_template_kwargs, load_head
from spechead.generate import Speculation, Stats, generate
from spechead.log import Progress
from spechead.options import parse
from spechead.prompts import read_prompts, spread
from spechead.target import Target
from spechead.tree import Plan, chain, parse_plan

PLAIN, GENERATE, LOOKUP = "plain", "generate", "prompt_lookup"
WARM_UP_TOKENS = 32
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of a pass


@dataclass
class BenchOptions:
    """What is decoded, by what, and where the numbers go."""

    target: str = ""
    """Model that decodes: smollm2-135m, a local folder or a hub id. Empty: the head's own, else smollm2-135m."""
    head: str = ""
    """Folder of a trained head to measure. Empty: none."""
    tree: list[str] = field(default_factory=list)
    """Shapes for the head to draft, each measured, such as chain:3. Empty: the shape stored with the head."""
    draft_model: str = ""
    """A smaller model of the same tokenizer, measured here and as generate's assistant. Empty: none."""
    drafter: list[str] = field(default_factory=list)
    """Further drafters without training, as spechead eval names them, such as self:0-9. A tree may follow, behind a
    space: "self:0-9 chain:3"; else a chain of draft_tokens is drafted. prompt_lookup is always measured."""
    draft_tokens: int = 10
    """Tokens drafted in a pass by prompt lookup and by the draft model, here and in generate."""
    ngram: int = 2
    """Longest n-gram that prompt lookup looks for, here and in generate."""
    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} a line. Empty: spechead's own 40."""
    limit: int = 0
    """Use only this many prompts, spread over the kinds; 0: all."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    dtype: str = "float32"
    """Precision of the target: float32, bfloat16 or float16."""
    json: str = ""
    """File to write the numbers to. Empty: they are only printed."""


@dataclass(frozen=True)
class Question:
    """A prompt made ready for the target, and the longest answer it leaves room for."""

    ids: list[int]
    cap: int


@dataclass(frozen=True)
class Run:
    """One prompt decoded in one way."""

    tokens: list[int]
    seconds: float
    stats: Stats | None = None  # generate gives none

    @property
    def pace(self) -> float:
        """Seconds per token."""
        return self.seconds / len(self.tokens)


Decoder = Callable[[Question], Run]
Runs = Mapping[str, Sequence[Run]]  # by decoder, in the order of the prompts


def main(argv: Sequence[str]) -> None:
    options = parse(BenchOptions, argv, "bench_decode.py")
    check(options)
    name = options.target or (head_target(Path(options.head)) if options.head else EMBEDDED)
    target = Target.load(name, dtype=options.dtype)
    questions = prepare(target, options)
    runs = measure(decoders(target, options), questions)
    past, v = passes_by_size(target, questions, runs[PLAIN])
    found = numbers(runs) | {"v": v, "v_past": past} | surroundings(target, options)
    show(found)
    if options.json:
        write_json(Path(options.json), found)


# ------------------------------------------------------------------------------------------------ preparing


def check(options: BenchOptions) -> None:
    """Refuse before anything is loaded what would be refused behind it."""
    for name, least in (("draft_tokens", 1), ("ngram", 1), ("limit", 0), ("max_new_tokens", 2)):
        if getattr(options, name) < least:
            raise UserError(f"{name} {getattr(options, name)}: must be {least} or more")
    if options.tree and not options.head:
        raise UserError(f"tree {options.tree[0]}: is for a head; give --head, or write --drafter 'NAME TREE'")
    for tree in options.tree:
        parse_plan(tree)
    if options.json and Path(options.json).is_dir():
        raise UserError(f"json {options.json}: is a folder, a file is expected")
    make_folder(Path(options.json).parent)


def prepare(target: Target, options: BenchOptions) -> list[Question]:
    """The prompts as token ids; answers are cut to the target's positions."""
    prompts = read_prompts(Path(options.prompts) if options.prompts else shipped("eval/prompts/held_out.jsonl"))
    template = head_template_kwargs(Path(options.head)) if options.head else {}
    questions = []
    for prompt in spread(prompts, options.limit) if options.limit else prompts:
        ids = chat.prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.text}], template)
        room = target.max_positions - len(ids)
        if room < 2:
            raise UserError(
                f"prompt {prompt.question_id} has {len(ids)} tokens: "
                f"too long for the {target.max_positions} positions of {target.name}"
            )
        questions.append(Question(ids, min(options.max_new_tokens, room)))
    return questions


# ------------------------------------------------------------------------------------------------ decoders


def decoders(target: Target, options: BenchOptions) -> dict[str, Decoder]:
    """Every decoder by its name. Where generate has the like, the two have equal settings."""
    length = chain(options.draft_tokens)
    lookup = parse_drafter(f"{LOOKUP}:ngram={options.ngram},match=first", target)  # generate takes the first match, too
    found: dict[str, Decoder] = {
        PLAIN: partial(ours, target, None, None),
        GENERATE: partial(theirs, target, {}),
        LOOKUP: partial(ours, target, lookup, length),
        beside(LOOKUP): partial(theirs, target, lookup_settings(options)),
    }
    if options.draft_model:
        name = f"draft_model:{options.draft_model}"
        model = parse_drafter(name, target)
        assert isinstance(model, DraftModel)
        found[name] = partial(ours, target, model, length)
        found[beside(name)] = partial(theirs, target, assistant_settings(target, model.draft, options))
    for text in options.drafter:
        if text not in found:
            drafter, plan = named_drafter(text, target)
            found[text] = partial(ours, target, drafter, plan or length)
    if options.head:
        head = load_head(Path(options.head), target)
        for plan in map(parse_plan, options.tree or [str(head.tree)]):
            found[f"{head.kind} {plan}"] = partial(ours, target, head, plan)
    return found


def beside(name: str) -> str:
    """What generate's own version of a drafter is called."""
    return f"{GENERATE}, {name}"


def named_drafter(text: str, target: Target) -> tuple[Drafter, Plan | None]:
    """`self:0-9 chain:3` -> the drafter and its tree; without a tree, None."""
    name, *trees = re.split(" (?=(?:chain|static|dynamic):)", text, maxsplit=1)
    plan = parse_plan(trees[0]) if trees else None
    return parse_drafter(name, target), plan


def lookup_settings(options: BenchOptions) -> dict[str, Any]:
    """For generate: prompt lookup has no schedule, its length is the same in each pass."""
    return {"prompt_lookup_num_tokens": options.draft_tokens, "max_matching_ngram_size": options.ngram}


def assistant_settings(target: Target, draft: Target, options: BenchOptions) -> dict[str, Any]:
    """For generate: an assistant that drafts as many tokens in each pass, without its schedule and its confidence
    threshold. It takes these from the assistant's own configuration, and from nowhere else."""
    config = draft.model.generation_config
    config.num_assistant_tokens = options.draft_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    settings: dict[str, Any] = {"assistant_model": draft.model}
    if draft.config.vocab_size != target.config.vocab_size:  # generate then wants to compare texts instead of ids
        settings |= {"tokenizer": target.tokenizer, "assistant_tokenizer": draft.tokenizer}
    return settings


def ours(target: Target, drafter: Drafter | None, plan: Plan | None, question: Question) -> Run:
    start = now(target.device)
    done = generate(target, question.ids, drafter, speculation=Speculation(plan), max_new_tokens=question.cap)
    return Run(done.tokens, now(target.device) - start, done.stats)


def theirs(target: Target, settings: dict[str, Any], question: Question) -> Run:
    ids = torch.tensor([question.ids], device=target.device)  # [1, P]
    start = now(target.device)
    whole: Any = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=question.cap,
        eos_token_id=sorted(target.eos_ids) or None,
        pad_token_id=min(target.eos_ids, default=0),
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        repetition_penalty=1.0,
        **settings,
    )
    seconds = now(target.device) - start
    return Run(whole[0, len(question.ids) :].tolist(), seconds)


def now(device: torch.device) -> float:
    """The time, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ------------------------------------------------------------------------------------------------ measuring


def measure(modes: Mapping[str, Decoder], questions: Sequence[Question]) -> Runs:
    """Decode every question in every mode, after a short run of each."""
    for decode in modes.values():
        decode(Question(questions[0].ids, min(WARM_UP_TOKENS, questions[0].cap)))
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    with Progress("benchmark", len(questions) * len(modes), unit="run") as progress:
        for turn, question in enumerate(questions):
            for name in rotated(list(modes), turn):
                runs[name].append(modes[name](question))
                progress.advance()
    if not any(run.stats and run.stats.passes for run in runs[PLAIN]):
        raise UserError("every answer ended with its first token: there is no pass to measure; try other prompts")
    return runs


def rotated(names: list[str], turn: int) -> list[str]:
    """The order of one turn, in which each mode comes first equally often."""
    first = turn % len(names)
    return names[first:] + names[:first]


def passes_by_size(target: Target, questions: Sequence[Question], plain: Sequence[Run]) -> tuple[int, dict[str, float]]:
    """v(n) by n, behind as many tokens as stand before the middle of a typical answer, and how many these are."""
    middles = [len(question.ids) + len(run.tokens) // 2 for question, run in zip(questions, plain, strict=True)]
    sizes = [size for size in SIZES if size < target.max_positions]
    past = min(int(median(middles)), target.max_positions - sizes[-1])
    return past, dict(zip(map(str, sizes), verify_costs(target, sizes, past), strict=True))


# ------------------------------------------------------------------------------------------------ numbers


def numbers(runs: Runs) -> dict[str, Any]:
    """The ratios of seconds per token, ours over generate's, and what is known of each decoder."""
    rows = {name: row(found, runs[PLAIN]) for name, found in runs.items()}
    drafting = {name: found for name, found in rows.items() if name != PLAIN and found["acceptance_length"] is not None}
    texts = [found["texts"] for name, found in rows.items() if name != PLAIN]
    shown = ("acceptance_length", "seconds_per_token", "speedup")
    return {
        "plain_over_generate": ratio(runs[PLAIN], runs[GENERATE]),
        "lookup_over_generate_lookup": ratio(runs[LOOKUP], runs[beside(LOOKUP)]),
        "over_generate": {name: ratio(runs[name], runs[beside(name)]) for name in runs if beside(name) in runs},
        "overhead_share": max(found["overhead_share"] for found in drafting.values()),  # the worst drafter's
        "drafters": {name: {key: found[key] for key in shown} for name, found in drafting.items()},
        "decoders": rows,
        "texts": {name: sum(found[name] for found in texts) for name in ("checked", "equal")},
    }


def row(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """One decoder: acceptance length and overhead are None where it does not tell."""
    stats = [run.stats for run in runs if run.stats and run.stats.passes]
    return {
        "seconds_per_token": median(run.pace for run in runs),
        "speedup": ratio(plain, runs),
        "acceptance_length": metrics.acceptance_length(sum(s.tokens for s in stats), sum(s.passes for s in stats)),
        "overhead_share": median(map(overhead, stats)) if stats else None,
        "texts": {
            "checked": len(runs),
            "equal": sum(run.tokens == other.tokens for run, other in zip(runs, plain, strict=True)),
        },
    }


def ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """Seconds per token over the others', the median over the prompts."""
    return median(run.pace / other.pace for run, other in zip(runs, others, strict=True))


def overhead(stats: Stats) -> float:
    """Share of the passes' time in which neither the drafter nor the target works."""
    spent = {phase: seconds for phase, seconds in stats.seconds.items() if phase != "prefill"}
    return 1 - (spent["draft"] + spent["verify"]) / sum(spent.values())


def surroundings(target: Target, options: BenchOptions) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "target": target.name,
        "settings": asdict(options),
        "machine": describe_machine(target.device) | {"device": str(target.device)},
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def show(found: Mapping[str, Any]) -> None:
    width = max(map(len, found["decoders"]))
    print(f"{'decoder':<{width}}  s/token  speed-up  tokens/pass  outside draft and verify  text as plain")
    for name, row in found["decoders"].items():
        tau = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        outside = "-" if row["overhead_share"] is None else f"{row['overhead_share']:.1%}"
        texts = "{equal}/{checked}".format(**row["texts"])
        times = f"{row['seconds_per_token']:>7.4f}  {row['speedup']:>8.2f}"
        print(f"{name:<{width}}  {times}  {tau:>11}  {outside:>24}  {texts:>13}")
    over = {PLAIN: found["plain_over_generate"]} | found["over_generate"]
    print("\nseconds per token, ours / generate's: " + ", ".join(f"{name} {value:.2f}" for name, value in over.items()))
    print(f"time of a pass over n tokens / over one, behind {found['v_past']} tokens:")
    print("  n    " + "  ".join(f"{size:>5}" for size in found["v"]))
    print("  v(n) " + "  ".join(f"{value:>5.2f}" for value in found["v"].values()))
    if found["texts"]["equal"] < found["texts"]["checked"]:
        print("\nNOT LOSSLESS: {equal} of {checked} texts equal plain decoding's".format(**found["texts"]))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
