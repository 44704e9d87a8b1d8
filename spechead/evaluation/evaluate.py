"""`spechead eval`: plain and speculative decoding of the same prompts, interleaved in one process.

Writes report.json and report.html and prints the table. metrics.py defines the numbers, aggregate.py pools them,
report.py and page.py present them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch

from spechead import __version__, metrics
from spechead.data.prompts import balanced
from spechead.decoding.detokenize import StreamDetokenizer
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.evaluation import aggregate, measure
from spechead.evaluation.aggregate import Comparison, Decoded, Reference
from spechead.evaluation.measure import DEFAULT_PROMPTS, MeasureOptions, Mode, Question
from spechead.evaluation.options import DecodingOptions, note_ignored_generation
from spechead.evaluation.page import write_html
from spechead.evaluation.report import print_report
from spechead.files import make_folder, reason, write_json
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.model import Target

GENERATE, PLAIN = "generate", "plain"


@dataclass(kw_only=True)
class EvalOptions(MeasureOptions, DecodingOptions):
    """Measure tokens per pass, speed-up, and whether the text equals plain decoding's."""

    generate_prompts: Annotated[int, Range(0)] = 8
    """How many prompts, spread over the categories, transformers' own generate decodes too."""
    out: str = ""
    """Folder for report.json and report.html. Empty: RUN/eval for a head in RUN/head, else HEAD/eval; runs/eval
    without a head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head and not self.drafter:
            raise UserError("option drafter: nothing to measure; give --head, --drafter or both")
        for plan in self.plans:
            self.speculation(plan)

    def labels(self, mode: Mode) -> dict[str, Any]:
        """The labels of a mode's numbers in the report."""
        rule = self.speculation(mode.plan).rule
        return {"drafter": mode.kind, "tree": str(mode.plan), "rule": rule, "lossy": self.lossy}


def evaluate(options: EvalOptions) -> dict[str, Any]:
    """Measure, write report.json and report.html, print the table; returns the report."""
    out = _out_folder(options)
    prompts = options.read_prompts()
    _check_writable(out)

    target = options.load_target()
    note_ignored_generation(target)
    modes = measure.make_modes(options, target)
    for mode in modes:
        options.speculation(mode.plan)  # refuses a drafter's own tree if the options do not fit it
    questions = measure.encode_prompts(prompts, target, options, options.seed)

    comparisons = compare(target, modes, questions, options)
    costs = measure.verify_costs(target, [mode.plan.nodes + 1 for mode in modes])
    main = comparisons[modes[0].name]
    report = {
        "schema": 1,
        "target": target.name,
        "head": options.head,
        "kind": modes[0].kind,
        "dtype": options.precision,
        "device": str(target.device),
        "machine": measure.describe_machine(target.device),
        "settings": _settings(options, modes, target),
        "suites": _suites(options, modes, comparisons, costs),
        "examples": [_example(pair, modes[0], target) for pair in _first_of_each_category(main)],
        "runs": [row for mode in modes for row in aggregate.prompt_rows(comparisons[mode.name], options.labels(mode))],
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
    if not Path(options.head).is_dir():  # else a misspelt name would become a folder
        raise UserError(f"option head: {options.head} is no folder, give the folder of a trained head")
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


def compare(target: Target, modes: Sequence[Mode], questions: Sequence[Question], options: EvalOptions) -> Comparisons:
    """Decode every question plainly and in every mode, interleaved in alternating order, after a warm-up."""
    decoders: dict[str, Callable[[Question], Decoded]] = {PLAIN: partial(_decode, target, options)}
    decoders |= {mode.name: partial(_decode, target, options, mode=mode) for mode in modes}
    with_generate = {p.question_id for p in balanced([q.prompt for q in questions], options.generate_prompts)}

    for decoder in decoders.values():
        decoder(questions[0].shortened())
    if with_generate:
        _decode_by_generate(target, options, questions[0].shortened())

    outputs: dict[str, list[Decoded]] = {name: [] for name in decoders}
    references: list[Reference | None] = []
    total = len(questions) * len(decoders) + len(with_generate)
    with Progress("evaluate", total, unit="run") as progress:
        for turn, question in enumerate(questions):
            order = [*decoders, GENERATE] if question.prompt.question_id in with_generate else [*decoders]
            reference = None
            for name in order if turn % 2 == 0 else reversed(order):
                if name == GENERATE:
                    reference = _decode_by_generate(target, options, question)
                else:
                    outputs[name].append(decoders[name](question))
                progress.advance(1, note=_tokens_per_pass(outputs[modes[0].name]))
            references.append(reference)

    comparisons: Comparisons = {}
    for mode in modes:
        pairs = zip(questions, outputs[PLAIN], outputs[mode.name], references, strict=True)
        comparisons[mode.name] = [_comparison(target, options, *pair) for pair in pairs]
    return comparisons


def _decode(target: Target, options: EvalOptions, question: Question, mode: Mode | None = None) -> Decoded:
    sampler = options.sampler(question.seed)
    if mode is None:
        return measure.decode(target, question, sampler=sampler)
    return measure.decode(target, question, mode.drafter, speculation=options.speculation(mode.plan), sampler=sampler)


def _decode_by_generate(target: Target, options: EvalOptions, question: Question) -> Reference:
    """The baseline of plain decoding: transformers' generate with the same sampling options."""
    settings: dict[str, Any] = {"repetition_penalty": options.repetition_penalty}
    if options.temperature > 0:
        cuts = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p or None}
        settings |= {"do_sample": True, "temperature": options.temperature, **cuts}
        torch.manual_seed(question.seed)
    return replace(measure.decode_by_generate(target, question, **settings), comparable=options.temperature == 0)


def _comparison(
    target: Target,
    options: EvalOptions,
    question: Question,
    plain: Decoded,
    speculative: Decoded,
    reference: Reference | None,
) -> Comparison:
    """Compare two outputs. Where they differ and must not, decode plainly once more, untimed, for the gap between the
    two best logits at that position."""
    if not options.comparable:
        return Comparison(question.prompt, plain, speculative, reference, comparable=False)
    difference = aggregate.divergence(question.prompt, plain.tokens, speculative.tokens)
    if difference is not None:
        gaps = generate(
            target,
            question.ids,
            max_new_tokens=question.max_new_tokens,
            sampler=options.sampler(question.seed),
            keep_gaps=True,
        ).gaps
        position = difference["position"]
        difference["gap"] = gaps[position] if position < len(gaps) else None
    return Comparison(question.prompt, plain, speculative, reference, difference)


def _tokens_per_pass(outputs: Sequence[Decoded]) -> str:
    passes = sum(output.stats.passes for output in outputs)
    tau = metrics.acceptance_length(sum(output.stats.tokens for output in outputs), passes)
    return "" if tau is None else f"{tau:.2f} tokens per pass"


# ------------------------------------------------------------------------------------------------ reporting


def _suites(
    options: EvalOptions, modes: Sequence[Mode], comparisons: Comparisons, costs: Sequence[float]
) -> dict[str, Any]:
    """The first mode as FILE and, by category of prompt, FILE/CATEGORY; each further mode as FILE@MODE."""
    stem = options.prompt_file.stem
    suites: dict[str, Any] = {}
    for mode, v in zip(modes, costs, strict=True):
        labels, pairs = options.labels(mode), comparisons[mode.name]
        name = f"{stem}@{mode.plan if mode.head else mode.name}" if suites else stem
        suites[name] = aggregate.suite_entry(pairs, labels)
        suites[name]["predicted"] = aggregate.prediction(suites[name], v)
        if name == stem:
            for category in dict.fromkeys(pair.prompt.category for pair in pairs):
                chosen = [pair for pair in pairs if pair.prompt.category == category]
                suites[f"{stem}/{category}"] = aggregate.suite_entry(chosen, labels)
    return suites


def _settings(options: EvalOptions, modes: Sequence[Mode], target: Target) -> dict[str, Any]:
    return asdict(options) | {
        "prompts": options.prompts or DEFAULT_PROMPTS,
        "tree": list(dict.fromkeys(str(mode.plan) for mode in modes)),
        "rule": options.speculation().rule,
        "draft_dtype": target.drafting_dtype(options.draft_dtype),
        "target_fingerprint": target.fingerprint,
        "ignored_generation": target.ignored_generation,
        "foreign_data": options.head_info().foreign_data if options.head else "",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def _first_of_each_category(pairs: Sequence[Comparison]) -> list[Comparison]:
    first: dict[str, Comparison] = {}
    for pair in pairs:
        first.setdefault(pair.prompt.category, pair)
    return list(first.values())


def _example(pair: Comparison, mode: Mode, target: Target) -> dict[str, Any]:
    """An answer in pieces [text, depth]: the depth of the accepted draft, 0 for the target's own tokens."""
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
