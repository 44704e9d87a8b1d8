"""Measure a head and other drafters: plain and speculative decoding of the same prompts, interleaved, in one process.

Writes report.json and report.html and prints the table. What the numbers mean stands in metrics.py, how they
are pooled in suites.py, how they look in report.py. Knows nothing of any particular head.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from spechead import __version__, metrics
from spechead.data.prompts import balanced
from spechead.decoding.detokenize import StreamDetokenizer
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.evaluation.aggregate import Comparison, Reference, Run, divergence, predicted, rows, suite
from spechead.evaluation.measure import (
    DEFAULT_PROMPTS,
    MeasureOptions,
    Mode,
    Question,
    decode,
    decode_by_generate,
    describe_machine,
    modes,
    questions,
    verify_costs,
)
from spechead.evaluation.options import DecodingOptions
from spechead.evaluation.page import write_html
from spechead.evaluation.report import print_report
from spechead.files import make_folder, reason, write_json
from spechead.heads.files import head_foreign
from spechead.progress import Progress
from spechead.target.model import Target

GENERATE, PLAIN = "generate", "plain"


@dataclass(kw_only=True)
class EvalOptions(MeasureOptions, DecodingOptions):
    """How many tokens a pass yields, how much faster that is, and whether the text stays the same."""

    generate_prompts: int = 8
    """How many prompts, spread over the kinds, transformers' own generate decodes too."""
    out: str = ""
    """Folder for report.json and report.html. Empty: RUN/eval for a head in RUN/head, else HEAD/eval; runs/eval
    without a head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head and not self.drafter:
            raise UserError("nothing to measure: give --head, --drafter or both")
        for plan in self.plans:
            self.speculation(plan)
        if self.generate_prompts < 0:
            raise UserError(f"generate_prompts {self.generate_prompts}: must be 0 or more")

    def about(self, mode: Mode) -> dict[str, Any]:
        """What the report's numbers of a mode are marked with."""
        rule = self.speculation(mode.plan).rule
        return {"drafter": mode.kind, "tree": str(mode.plan), "rule": rule, "lossy": self.lossy}


def evaluate(options: EvalOptions) -> dict[str, Any]:
    """The whole measurement: returns the report, which is then on disk and on the console."""
    out = _out_folder(options)
    prompts = options.read_prompts()
    _check_writable(out)

    target = options.load_target()
    ways = modes(options, target)
    for mode in ways:
        options.speculation(mode.plan)  # refuses a drafter's own tree where the options do not fit it
    asked = questions(prompts, target, options, options.seed)

    comparisons = measure(target, ways, asked, options)
    verifying = verify_costs(target, [mode.plan.nodes + 1 for mode in ways])
    main = comparisons[ways[0].name]
    report = {
        "schema": 1,
        "target": target.name,
        "head": options.head,
        "kind": ways[0].kind,
        "dtype": options.dtype,
        "device": str(target.device),
        "machine": describe_machine(target.device),
        "settings": _settings(options, ways, target),
        "suites": _suites(options, ways, comparisons, verifying),
        "examples": [_example(pair, ways[0], target) for pair in _first_of_each_kind(main)],
        "runs": [row for mode in ways for row in rows(comparisons[mode.name], options.about(mode))],
    }
    write_json(out / "report.json", report)
    write_html(report, out / "report.html")
    print_report(report, out)
    return report


# ------------------------------------------------------------------------------------------------ preparing


def _out_folder(options: EvalOptions) -> Path:
    if options.out:
        return Path(options.out)
    if not options.head:
        return Path("runs/eval")
    if not Path(options.head).is_dir():  # else a mistyped name would become a folder
        raise UserError(f"no head at {options.head}: a folder that training wrote is expected")
    return default_folder(Path(options.head))


def default_folder(head: Path) -> Path:
    """A run keeps its head in RUN/head and its evaluation in RUN/eval."""
    return (head.parent if head.name == "head" else head) / "eval"


def _check_writable(out: Path) -> None:
    """Refuse before the measurement, not after it."""
    make_folder(out)
    probe = out / ".writable"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write into the folder {out}: {reason(error)}") from error


# ------------------------------------------------------------------------------------------------ measuring

Comparisons = dict[str, list[Comparison]]  # by the name of the mode, in the order of the prompts


def measure(target: Target, ways: Sequence[Mode], asked: Sequence[Question], options: EvalOptions) -> Comparisons:
    """Decode every question plainly and in every mode, in turns and in alternating order, after a warm-up."""
    decoders: dict[str, Callable[[Question], Run]] = {PLAIN: partial(_decode, target, options)}
    decoders |= {mode.name: partial(_decode, target, options, mode=mode) for mode in ways}
    with_generate = {p.question_id for p in balanced([q.prompt for q in asked], options.generate_prompts)}

    for decoder in decoders.values():
        decoder(asked[0].shortened())
    if with_generate:
        _decode_by_generate(target, options, asked[0].shortened())

    runs: dict[str, list[Run]] = {name: [] for name in decoders}
    references: list[Reference | None] = []
    total = len(asked) * len(decoders) + len(with_generate)
    with Progress("evaluate", total, unit="run") as progress:
        for turn, question in enumerate(asked):
            order = [*decoders, GENERATE] if question.prompt.question_id in with_generate else [*decoders]
            reference = None
            for name in order if turn % 2 == 0 else reversed(order):
                if name == GENERATE:
                    reference = _decode_by_generate(target, options, question)
                else:
                    runs[name].append(decoders[name](question))
                progress.advance(1, note=_so_far(runs[ways[0].name]))
            references.append(reference)

    comparisons: Comparisons = {}
    for mode in ways:
        pairs = zip(asked, runs[PLAIN], runs[mode.name], references, strict=True)
        comparisons[mode.name] = [_compare(target, options, *pair) for pair in pairs]
    return comparisons


def _decode(target: Target, options: EvalOptions, question: Question, mode: Mode | None = None) -> Run:
    sampler = options.sampler(question.seed)
    if mode is None:
        return decode(target, question, sampler=sampler)
    return decode(target, question, mode.drafter, speculation=options.speculation(mode.plan), sampler=sampler)


def _decode_by_generate(target: Target, options: EvalOptions, question: Question) -> Reference:
    """What plain decoding has to keep up with."""
    settings: dict[str, Any] = {"repetition_penalty": options.repetition_penalty}
    if options.temperature > 0:
        cuts = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p or None}
        settings |= {"do_sample": True, "temperature": options.temperature, **cuts}
        torch.manual_seed(question.seed)
    return replace(decode_by_generate(target, question, **settings), comparable=options.temperature == 0)


def _compare(
    target: Target,
    options: EvalOptions,
    question: Question,
    plain: Run,
    speculative: Run,
    reference: Reference | None,
) -> Comparison:
    """Plain beside speculative. Where they differ and must not, plain is decoded once more, outside the clock, for the
    gap between its two best logits there."""
    if not options.comparable:
        return Comparison(question.prompt, plain, speculative, reference, comparable=False)
    found = divergence(question.prompt, plain.tokens, speculative.tokens)
    if found is not None:
        gaps = generate(
            target,
            question.ids,
            max_new_tokens=question.max_new_tokens,
            sampler=options.sampler(question.seed),
            keep_gaps=True,
        ).gaps
        found["gap"] = gaps[found["position"]] if found["position"] < len(gaps) else None
    return Comparison(question.prompt, plain, speculative, reference, found)


def _so_far(runs: Sequence[Run]) -> str:
    passes = sum(run.stats.passes for run in runs)
    tau = metrics.acceptance_length(sum(run.stats.tokens for run in runs), passes)
    return "" if tau is None else f"{tau:.2f} tokens per pass"


# ------------------------------------------------------------------------------------------------ reporting


def _suites(
    options: EvalOptions, ways: Sequence[Mode], comparisons: Comparisons, verifying: Sequence[float]
) -> dict[str, Any]:
    """The first mode under the file's name and by kind of prompt; each further mode as FILE@MODE."""
    stem = options.prompt_file.stem
    found: dict[str, Any] = {}
    for mode, v in zip(ways, verifying, strict=True):
        about, pairs = options.about(mode), comparisons[mode.name]
        name = f"{stem}@{mode.plan if mode.head else mode.name}" if found else stem
        found[name] = suite(pairs, about)
        found[name]["predicted"] = predicted(found[name], v)
        if name == stem:
            for kind in dict.fromkeys(pair.prompt.category for pair in pairs):
                chosen = [pair for pair in pairs if pair.prompt.category == kind]
                found[f"{stem}/{kind}"] = suite(chosen, about)
    return found


def _settings(options: EvalOptions, ways: Sequence[Mode], target: Target) -> dict[str, Any]:
    return asdict(options) | {
        "prompts": options.prompts or DEFAULT_PROMPTS,
        "tree": list(dict.fromkeys(str(mode.plan) for mode in ways)),
        "rule": options.speculation().rule,
        "draft_dtype": target.drafting_dtype(options.draft_dtype),
        "target_fingerprint": target.fingerprint,
        "foreign_data": head_foreign(Path(options.head)) if options.head else "",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def _first_of_each_kind(pairs: Sequence[Comparison]) -> list[Comparison]:
    first: dict[str, Comparison] = {}
    for pair in pairs:
        first.setdefault(pair.prompt.category, pair)
    return list(first.values())


def _example(pair: Comparison, mode: Mode, target: Target) -> dict[str, Any]:
    """An answer in pieces [text, depth]: depth of the accepted draft, 0 where the target wrote it itself."""
    stream = StreamDetokenizer(target.tokenizer)
    pieces: list[list[Any]] = []
    for tokens, accepted in pair.speculative.commits:
        for index, token in enumerate(tokens):
            pieces += map(list, stream.push(token, index + 1 if index < accepted else 0))
    pieces += map(list, stream.close())
    prompt = pair.prompt
    return {
        "prompt": prompt.question_id,
        "category": prompt.category,
        "text": prompt.text,
        "tree": str(mode.plan),
        "pieces": pieces,
    }
