"""Decoding speed: spechead against transformers' generate, both plain and with drafts.

    python eval/bench_decode.py --head runs/eagle3-smollm2/head --tree chain:3 --tree chain:5 --json bench.json

Every decoder answers every prompt, greedily, on one model object and after a warm-up; their order rotates from prompt
to prompt. Seconds are those of the whole answer, prefill included. Ratios are formed per prompt and their median is
reported, so that one disturbed run has little weight. Every output is compared with plain decoding's. Where generate
has the counterpart of a drafter (prompt lookup or a draft model, on a chain), it is measured with the same model and as
many drafts per pass.

`overhead_share` is the share of the passes' time spent outside the two models, of the drafter with the largest. It is
measured separately, after the timed runs, since it needs hooks. Inside is the time in torch modules: the target's
layers and output layer, and those of the head or the draft model. Outside is all else: building trees and batches of
trees, ranking drafts, masks, processors, the rule, the rows of the cache, and the Python between them; a prompt lookup
is outside as a whole. Shares by phase are those of `Stats.seconds`.
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
from spechead.evaluation.aggregate import Decoded, Reference
from spechead.evaluation.measure import (
    MeasureOptions,
    Mode,
    Question,
    decode,
    decode_by_generate,
    describe_machine,
    encode_prompts,
    make_modes,
    passes_by_size,
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
    """Compare spechead with transformers' generate, greedily. Without --head and --target, the target is smollm2-135m.

    The drafter prompt_lookup is always measured. Where generate has the counterpart of a drafter, and its tree is a
    chain, it is measured too.
    """

    json: str = ""
    """File to write the numbers to. Empty: only print them."""

    def __post_init__(self) -> None:
        if not self.head and not self.target:
            self.target = BUNDLED
        super().__post_init__()
        if LOOKUP not in self.drafter:
            self.drafter = [LOOKUP, *self.drafter]


Output = Decoded | Reference
Decoder = Callable[[Question], Output]
Outputs = Mapping[str, Sequence[Output]]  # by decoder, in the order of the prompts


def main(argv: Sequence[str]) -> None:
    options = parse(BenchOptions, argv, "bench_decode.py")
    prompts = options.read_prompts()
    if options.json:
        if Path(options.json).is_dir():
            raise UserError(f"option json: {options.json} is a folder, name a file")
        make_folder(Path(options.json).parent)
    target = options.load_target()
    modes = make_modes(options, target)
    questions = encode_prompts(prompts, target, options)
    outputs = measure(make_decoders(target, modes), questions)
    overheads = {mode.name: overhead(target, questions, mode) for mode in modes} | {PLAIN: overhead(target, questions)}
    past, v = passes_by_size(target, questions, outputs[PLAIN])
    results = numbers(outputs, overheads) | {"v": v, "v_past": past} | provenance(target, options)
    print_results(results)
    if options.json:
        write_json(Path(options.json), results)


# ------------------------------------------------------------------------------------------------ decoders


def make_decoders(target: Target, modes: Sequence[Mode]) -> dict[str, Decoder]:
    """Every decoder by its name; generate's counterpart of a drafter follows ours."""
    decoders: dict[str, Decoder] = {PLAIN: partial(decode, target), GENERATE: partial(decode_by_generate, target)}
    for mode in modes:
        decoders[mode.name] = partial(decode, target, drafter=mode.drafter, speculation=Speculation(mode.plan))
        if other := counterpart(target, mode):
            decoders[counterpart_name(mode.name)] = other
    return decoders


def counterpart_name(name: str) -> str:
    """The name of generate's counterpart of a drafter."""
    return f"{GENERATE}, {name}"


def counterpart(target: Target, mode: Mode) -> partial[Reference] | None:
    """generate with the counterpart of the mode's drafter, if it has one and the tree is a chain, at equal settings."""
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
    """generate with an assistant that drafts as many tokens per pass, without its schedule and confidence threshold,
    which it reads only from the assistant's own configuration."""
    config = draft.model.generation_config
    config.num_assistant_tokens = depth
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    settings: dict[str, Any] = {"assistant_model": draft.model}
    if draft.config.vocab_size != target.config.vocab_size:  # generate then compares texts instead of ids
        settings |= {"tokenizer": target.tokenizer, "assistant_tokenizer": draft.tokenizer}
    return decode_by_generate(target, question, **settings)


# ------------------------------------------------------------------------------------------------ measuring


def measure(decoders: Mapping[str, Decoder], questions: Sequence[Question]) -> Outputs:
    """Decode every question with every decoder, after a warm-up of each."""
    for decoder in decoders.values():
        decoder(questions[0].shortened())
    outputs: dict[str, list[Output]] = {name: [] for name in decoders}
    with Progress("benchmark", len(questions) * len(decoders), unit="run") as progress:
        for turn, question in enumerate(questions):
            for name in rotated(list(decoders), turn):
                outputs[name].append(decoders[name](question))
                progress.advance()
    if not any(output.stats.passes for output in outputs[PLAIN] if isinstance(output, Decoded)):
        raise UserError("option prompts: every answer ended with its first token, there is no pass to measure")
    return outputs


def rotated(names: list[str], turn: int) -> list[str]:
    """The order of one turn, in which each decoder comes first equally often."""
    first = turn % len(names)
    return names[first:] + names[:first]


def overhead(target: Target, questions: Sequence[Question], mode: Mode | None = None) -> float | None:
    """Share of the passes' time outside torch modules, the median over a few prompts; None without a pass."""
    shares = []
    for question in questions[:OVERHEAD_PROMPTS]:
        n_spans: list[int] = []  # before each commit, the prefill's first
        with ModuleSpans(target.device) as spans:
            stats = generate(
                target,
                question.ids,
                mode.drafter if mode else None,
                speculation=Speculation(mode.plan) if mode else RANKED,
                max_new_tokens=min(OVERHEAD_TOKENS, question.max_new_tokens),
                on_commit=lambda *_, n_spans=n_spans, spans=spans: n_spans.append(len(spans.marks)),
            ).stats
        if stats.passes:
            whole = sum(stats.seconds.values()) - stats.seconds["prefill"]
            shares.append(1 - spans.seconds(n_spans[0]) / whole)
    return median(shares) if shares else None


class ModuleSpans:
    """The times at which torch enters and leaves a module; nested calls are not counted."""

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
        """Time inside modules from span number `first` on; waits for the accelerator."""
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


def numbers(outputs: Outputs, overheads: Mapping[str, float | None]) -> dict[str, Any]:
    """The ratios of seconds per token, spechead's / generate's, and the numbers of each decoder."""
    plain = outputs[PLAIN]
    rows = {name: row(out, plain) | {"overhead_share": overheads.get(name)} for name, out in outputs.items()}
    drafting = {name: one for name, one in rows.items() if name != PLAIN and one["acceptance_length"] is not None}
    shares = [one["overhead_share"] for one in drafting.values() if one["overhead_share"] is not None]
    others = {name: outputs[counterpart_name(name)] for name in outputs if counterpart_name(name) in outputs}
    pairs = {name: ratio(outputs[name], other) for name, other in others.items()}
    columns = ("acceptance_length", "seconds_per_token", "speedup")
    return {
        "plain_over_generate": ratio(plain, outputs[GENERATE]),
        "lookup_over_generate_lookup": next(value for name, value in pairs.items() if name.split()[0] == LOOKUP),
        "over_generate": pairs,
        "overhead_share": max(shares, default=None),  # the worst drafter's
        "drafters": {name: {key: one[key] for key in columns} for name, one in drafting.items()},
        "decoders": rows,
        "texts": texts([one for name, one in rows.items() if one["ours"] and name != PLAIN]),
        "generate_texts": texts([one for one in rows.values() if not one["ours"]]),
    }


def row(outputs: Sequence[Output], plain: Sequence[Output]) -> dict[str, Any]:
    """One decoder; acceptance length and phases are None where it does not report them."""
    stats = [output.stats for output in outputs if isinstance(output, Decoded) and output.stats.passes]
    passes = {phase: sum(s.seconds[phase] for s in stats) for phase in (stats[0].seconds if stats else ())}
    passes.pop("prefill", None)
    return {
        "ours": isinstance(outputs[0], Decoded),
        "seconds_per_token": median(map(seconds_per_token, outputs)),
        "speedup": ratio(plain, outputs),
        "acceptance_length": metrics.acceptance_length(sum(s.tokens for s in stats), sum(s.passes for s in stats)),
        "phases": {phase: spent / sum(passes.values()) for phase, spent in passes.items()} or None,
        "texts": {
            "checked": len(outputs),
            "equal": sum(output.tokens == other.tokens for output, other in zip(outputs, plain, strict=True)),
        },
    }


def texts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(row["texts"][name] for row in rows) for name in ("checked", "equal")}


def seconds_per_token(output: Output) -> float:
    return output.seconds / len(output.tokens)


def ratio(outputs: Sequence[Output], others: Sequence[Output]) -> float:
    """Seconds per token / the others', the median over the prompts."""
    pairs = zip(map(seconds_per_token, outputs), map(seconds_per_token, others), strict=True)
    return median(one / other for one, other in pairs)


def provenance(target: Target, options: BenchOptions) -> dict[str, Any]:
    """What the numbers depend on."""
    dtypes = {"dtype": options.precision, "draft_dtype": target.drafting_dtype(options.draft_dtype)}
    return {
        "target": target.name,
        "settings": asdict(options) | dtypes,
        "machine": describe_machine(target.device) | {"device": str(target.device)},
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def print_results(results: Mapping[str, Any]) -> None:
    width = max(map(len, results["decoders"]))
    print(f"{'decoder':<{width}}  s/token  speed-up  tokens/pass  outside the models  text as plain")
    for name, row in results["decoders"].items():
        tau = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        outside = "-" if row["overhead_share"] is None else f"{row['overhead_share']:.1%}"
        same = "{equal}/{checked}".format(**row["texts"])
        times = f"{row['seconds_per_token']:>7.4f}  {row['speedup']:>8.2f}"
        print(f"{name:<{width}}  {times}  {tau:>11}  {outside:>18}  {same:>13}")
    over = {PLAIN: results["plain_over_generate"]} | results["over_generate"]
    print(
        "\nseconds per token, spechead / generate: " + ", ".join(f"{name} {value:.2f}" for name, value in over.items())
    )
    print(f"time of a pass over n tokens / over one, after {results['v_past']} tokens:")
    print("  n    " + "  ".join(f"{size:>5}" for size in results["v"]))
    print("  v(n) " + "  ".join(f"{value:>5.2f}" for value in results["v"].values()))
    for line in remarks(results):
        print(f"\n{line}")


def remarks(results: Mapping[str, Any]) -> list[str]:
    """The outputs that differ. Ours must not in float32; in half precision a wider pass may turn a near tie."""
    lines = []
    ours, generates, dtype = results["texts"], results["generate_texts"], results["settings"]["dtype"]
    if ours["equal"] < ours["checked"]:
        alarm = "NOT LOSSLESS: " if dtype == "float32" else ""
        lines.append(f"{alarm}{ours['equal']} of {ours['checked']} texts with drafts equal plain decoding's in {dtype}")
    if generates["equal"] < generates["checked"]:
        lines.append(f"generate wrote plain decoding's text {generates['equal']} of {generates['checked']} times")
    return lines


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
