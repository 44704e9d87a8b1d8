"""How fast decoding is here: our decoder beside transformers' generate, both of them plain and with drafts.

    python eval/bench_decode.py --head runs/eagle3-smollm2/head --tree chain:3 --tree chain:5 --json bench.json

Every decoder writes the answer to every prompt, greedily, on one model object and after a warm-up; the order in which
they take turns is rotated from prompt to prompt. Seconds are those of the whole answer, prefill included. A ratio is
formed on each prompt and the median over the prompts is told, so that a disturbed run does not move it. Every text is
compared with plain decoding's. Where generate has the like of a drafter (prompt lookup on a chain, a draft model on a
chain), it is measured beside ours with the same model and as many tokens drafted in each pass.

`overhead_share` is the share of the passes' time that is spent outside the two models, of the drafter with the largest.
It is measured apart, after the clock, since it needs hooks: inside is what passes while torch is in a module, which are
the target's layers and output layer, and those of the head or the draft model. Outside is all else: putting drafts
into a tree and trees into a batch, ranking drafts, masks, processors, the rule, keeping and dropping rows of the
cache, and Python between them. A prompt lookup is outside as a whole. Shares by phase of the timed runs are those of
docs/metrics.md, with accept and keep apart. Knows nothing of how a drafter drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spechead import __version__, metrics
from spechead.cli.main import one_line_errors
from spechead.decoding.generate import RANKED, Speculation, generate
from spechead.decoding.timing import Timestamp, elapsed, now
from spechead.drafters.base import is_chain
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.errors import UserError
from spechead.evaluation.aggregate import Reference, Run
from spechead.evaluation.measure import (
    MeasureOptions,
    Mode,
    Question,
    decode,
    decode_by_generate,
    describe_machine,
    modes,
    passes_by_size,
    questions,
)
from spechead.files import make_folder, write_json
from spechead.options import parse
from spechead.progress import Progress
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.model import Target

PLAIN, GENERATE, LOOKUP = "plain", "generate", "prompt_lookup"
OVERHEAD_PROMPTS, OVERHEAD_TOKENS = 4, 64


@dataclass(kw_only=True)
class BenchOptions(MeasureOptions):
    """Our decoder beside transformers' generate, greedy. Without --head and --target, of smollm2-135m.

    The drafter prompt_lookup is always measured. Where generate has the like of a drafter, and its tree is a chain, it
    is measured too.
    """

    json: str = ""
    """File to write the numbers to. Empty: they are only printed."""

    def __post_init__(self) -> None:
        if not self.head and not self.target:
            self.target = BUNDLED
        super().__post_init__()
        if LOOKUP not in self.drafter:
            self.drafter = [LOOKUP, *self.drafter]


Decoder = Callable[[Question], Run | Reference]
Runs = Mapping[str, Sequence[Run | Reference]]  # by decoder, in the order of the prompts


def main(argv: Sequence[str]) -> None:
    options = parse(BenchOptions, argv, "bench_decode.py")
    prompts = options.read_prompts()
    if options.json:
        if Path(options.json).is_dir():
            raise UserError(f"json {options.json}: is a folder, a file is expected")
        make_folder(Path(options.json).parent)
    target = options.load_target()
    ways = modes(options, target)
    asked = questions(prompts, target, options)
    runs = measure(decoders(target, ways), asked)
    outside = {mode.name: overhead(target, asked, mode) for mode in ways} | {PLAIN: overhead(target, asked)}
    past, v = passes_by_size(target, asked, runs[PLAIN])
    found = numbers(runs, outside) | {"v": v, "v_past": past} | surroundings(target, options)
    show(found)
    if options.json:
        write_json(Path(options.json), found)


# ------------------------------------------------------------------------------------------------ decoders


def decoders(target: Target, ways: Sequence[Mode]) -> dict[str, Decoder]:
    """Every decoder by its name; generate's own version of a drafter stands behind ours."""
    found: dict[str, Decoder] = {PLAIN: partial(decode, target), GENERATE: partial(decode_by_generate, target)}
    for mode in ways:
        found[mode.name] = partial(decode, target, drafter=mode.drafter, speculation=Speculation(mode.plan))
        if like := generates_own(target, mode):
            found[beside(mode.name)] = like
    return found


def beside(name: str) -> str:
    """What generate's own version of a drafter is called."""
    return f"{GENERATE}, {name}"


def generates_own(target: Target, mode: Mode) -> Decoder | None:
    """generate with the like of the mode's drafter, if it has one and the tree is a chain, at equal settings."""
    drafter, plan = mode.drafter, mode.plan
    if not is_chain(plan):
        return None
    if isinstance(drafter, PromptLookup) and drafter.match == "first":  # as generate matches
        return partial(
            decode_by_generate, target, prompt_lookup_num_tokens=plan.depth, max_matching_ngram_size=drafter.ngram
        )
    if isinstance(drafter, DraftModel) and not isinstance(drafter, SelfSpeculative) and not plan.floor:
        return partial(with_assistant, target, drafter.draft, plan.depth)
    return None


def with_assistant(target: Target, draft: Target, depth: int, question: Question) -> Reference:
    """generate with an assistant that drafts as many tokens in each pass, without its schedule and its confidence
    threshold. It takes these from the assistant's own configuration, and from nowhere else."""
    config = draft.model.generation_config
    config.num_assistant_tokens = depth
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    settings: dict[str, Any] = {"assistant_model": draft.model}
    if draft.config.vocab_size != target.config.vocab_size:  # generate then wants to compare texts instead of ids
        settings |= {"tokenizer": target.tokenizer, "assistant_tokenizer": draft.tokenizer}
    return decode_by_generate(target, question, **settings)


# ------------------------------------------------------------------------------------------------ measuring


def measure(found: Mapping[str, Decoder], asked: Sequence[Question]) -> Runs:
    """Decode every question by every decoder, after a short run of each."""
    for decoder in found.values():
        decoder(asked[0].shortened())
    runs: dict[str, list[Run | Reference]] = {name: [] for name in found}
    with Progress("benchmark", len(asked) * len(found), unit="run") as progress:
        for turn, question in enumerate(asked):
            for name in rotated(list(found), turn):
                runs[name].append(found[name](question))
                progress.advance()
    if not any(run.stats.passes for run in runs[PLAIN] if isinstance(run, Run)):
        raise UserError("every answer ended with its first token: there is no pass to measure; try other prompts")
    return runs


def rotated(names: list[str], turn: int) -> list[str]:
    """The order of one turn, in which each decoder comes first equally often."""
    first = turn % len(names)
    return names[first:] + names[:first]


def overhead(target: Target, asked: Sequence[Question], mode: Mode | None = None) -> float | None:
    """Share of the passes' time in which torch is in no module, the median over a few prompts; None without a pass."""
    shares = []
    for question in asked[:OVERHEAD_PROMPTS]:
        began: list[int] = []  # spans before each commit, the prefill's first
        with ModuleSpans(target.device) as spans:
            stats = generate(
                target,
                question.ids,
                mode.drafter if mode else None,
                speculation=Speculation(mode.plan) if mode else RANKED,
                max_new_tokens=min(OVERHEAD_TOKENS, question.max_new_tokens),
                on_commit=lambda *_, began=began, spans=spans: began.append(len(spans.marks)),
            ).stats
        if stats.passes:
            whole = sum(stats.seconds.values()) - stats.seconds["prefill"]
            shares.append(1 - spans.seconds(began[0]) / whole)
    return median(shares) if shares else None


class ModuleSpans:
    """When torch entered and left a module, nested calls not counted."""

    def __init__(self, device: torch.device) -> None:
        self.marks: list[tuple[Timestamp, Timestamp]] = []
        self._device, self._depth = device, 0

    def __enter__(self) -> ModuleSpans:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def seconds(self, first: int) -> float:
        """Spent inside modules from span number `first` on; waits for the accelerator."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return sum(elapsed(begin, end) for begin, end in self.marks[first:])

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._entered = now(self._device)
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.marks.append((self._entered, now(self._device)))


# ------------------------------------------------------------------------------------------------ numbers


def numbers(runs: Runs, outside: Mapping[str, float | None]) -> dict[str, Any]:
    """The ratios of seconds per token, ours over generate's, and what is known of each decoder."""
    rows = {name: row(found, runs[PLAIN]) | {"overhead_share": outside.get(name)} for name, found in runs.items()}
    drafting = {name: found for name, found in rows.items() if name != PLAIN and found["acceptance_length"] is not None}
    shares = [found["overhead_share"] for found in drafting.values() if found["overhead_share"] is not None]
    pairs = {name: ratio(runs[name], runs[beside(name)]) for name in runs if beside(name) in runs}
    shown = ("acceptance_length", "seconds_per_token", "speedup")
    return {
        "plain_over_generate": ratio(runs[PLAIN], runs[GENERATE]),
        "lookup_over_generate_lookup": next(value for name, value in pairs.items() if name.split()[0] == LOOKUP),
        "over_generate": pairs,
        "overhead_share": max(shares, default=None),  # the worst drafter's
        "drafters": {name: {key: found[key] for key in shown} for name, found in drafting.items()},
        "decoders": rows,
        "texts": texts([found for name, found in rows.items() if found["ours"] and name != PLAIN]),
        "generate_texts": texts([found for found in rows.values() if not found["ours"]]),
    }


def row(runs: Sequence[Run | Reference], plain: Sequence[Run | Reference]) -> dict[str, Any]:
    """One decoder: acceptance length and phases are None where it does not tell."""
    stats = [run.stats for run in runs if isinstance(run, Run) and run.stats.passes]
    passes = {phase: sum(s.seconds[phase] for s in stats) for phase in (stats[0].seconds if stats else ())}
    passes.pop("prefill", None)
    return {
        "ours": isinstance(runs[0], Run),
        "seconds_per_token": median(map(pace, runs)),
        "speedup": ratio(plain, runs),
        "acceptance_length": metrics.acceptance_length(sum(s.tokens for s in stats), sum(s.passes for s in stats)),
        "phases": {phase: spent / sum(passes.values()) for phase, spent in passes.items()} or None,
        "texts": {
            "checked": len(runs),
            "equal": sum(run.tokens == other.tokens for run, other in zip(runs, plain, strict=True)),
        },
    }


def texts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(found["texts"][name] for found in rows) for name in ("checked", "equal")}


def pace(run: Run | Reference) -> float:
    """Seconds per token."""
    return run.seconds / len(run.tokens)


def ratio(runs: Sequence[Run | Reference], others: Sequence[Run | Reference]) -> float:
    """Seconds per token over the others', the median over the prompts."""
    return median(pace(run) / pace(other) for run, other in zip(runs, others, strict=True))


def surroundings(target: Target, options: BenchOptions) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "target": target.name,
        "settings": asdict(options) | {"draft_dtype": target.drafting_dtype(options.draft_dtype)},
        "machine": describe_machine(target.device) | {"device": str(target.device)},
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def show(found: Mapping[str, Any]) -> None:
    width = max(map(len, found["decoders"]))
    print(f"{'decoder':<{width}}  s/token  speed-up  tokens/pass  outside the models  text as plain")
    for name, row in found["decoders"].items():
        tau = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        outside = "-" if row["overhead_share"] is None else f"{row['overhead_share']:.1%}"
        same = "{equal}/{checked}".format(**row["texts"])
        times = f"{row['seconds_per_token']:>7.4f}  {row['speedup']:>8.2f}"
        print(f"{name:<{width}}  {times}  {tau:>11}  {outside:>18}  {same:>13}")
    over = {PLAIN: found["plain_over_generate"]} | found["over_generate"]
    print("\nseconds per token, ours / generate's: " + ", ".join(f"{name} {value:.2f}" for name, value in over.items()))
    print(f"time of a pass over n tokens / over one, behind {found['v_past']} tokens:")
    print("  n    " + "  ".join(f"{size:>5}" for size in found["v"]))
    print("  v(n) " + "  ".join(f"{value:>5.2f}" for value in found["v"].values()))
    for line in remarks(found):
        print(f"\n{line}")


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Which texts differ. Ours must not, in float32; elsewhere a near tie may fall the other way in a wider pass."""
    said = []
    ours, theirs, dtype = found["texts"], found["generate_texts"], found["settings"]["dtype"]
    if ours["equal"] < ours["checked"]:
        alarm = "NOT LOSSLESS: " if dtype == "float32" else ""
        said.append(f"{alarm}{ours['equal']} of {ours['checked']} texts with drafts equal plain decoding's in {dtype}")
    if theirs["equal"] < theirs["checked"]:
        said.append(f"generate wrote plain decoding's text {theirs['equal']} of {theirs['checked']} times")
    return said


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
