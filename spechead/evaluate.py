"""Measure a head: plain and speculative decoding of the same prompts, interleaved, in one process.

Writes report.json and report.html and prints the table. What the numbers mean stands in metrics.py, how they
are pooled in suites.py, how they look in report.py. Knows nothing of any particular head.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spechead import __version__, chat, metrics
from spechead.cache import KVCache
from spechead.drafters.base import Drafter
from spechead.errors import UserError
from spechead.files import make_folder, reason, shipped, write_json
from spechead.formats.native import head_target, head_template_kwargs, load_head
from spechead.generate import Speculation, generate
from spechead.log import Progress
from spechead.page import write_html
from spechead.prompts import Prompt, read_prompts, spread
from spechead.report import print_report
from spechead.sampling import Sampler
from spechead.stream import TextStream
from spechead.suites import Comparison, Reference, Run, divergence, predicted, rows, suite
from spechead.target import Target
from spechead.tree import Plan, parse_plan

DEFAULT_PROMPTS = "eval/prompts/held_out.jsonl"
WARM_UP_TOKENS = 32
GENERATE = "generate"
PLAIN = "plain"


@dataclass
class EvalOptions:
    head: str
    """Folder of the trained head."""
    target: str = ""
    """Model that decodes: smollm2-135m, a local folder or a hub id. Empty: the head's own."""
    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} a line. Empty: spechead's own 40."""
    tree: list[str] = field(default_factory=list)
    """Shapes to draft, such as chain:3 or dynamic:nodes=15,depth=4,topk=3. The first is the main one; further
    ones are measured beside it on the same prompts. Empty: the shape stored with the head."""
    temperature: float = 0.0
    """0 decodes greedily; above it, samples."""
    top_k: int = 0
    """Sample among the K likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1: all."""
    seed: int = 0
    """Seed of sampling; the same for plain and speculative decoding, so that their texts must agree."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    limit: int = 0
    """Use only this many prompts, spread over the kinds; 0: all."""
    dtype: str = "float32"
    """Precision of the target: float32, bfloat16 or float16."""
    device: str = "auto"
    """cpu, cuda or auto."""
    generate_prompts: int = 8
    """How many prompts, spread over the kinds, transformers' own generate decodes too."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}; empty: those of the head's training."""
    out: str = ""
    """Folder for report.json and report.html. Empty: RUN/eval for a head in RUN/head, else HEAD/eval."""
    force: bool = False
    """Use the head with a target that it was not trained for."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's files."""


@dataclass
class Question:
    """A prompt made ready for the target."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int
    seed: int


def evaluate(options: EvalOptions) -> dict[str, Any]:
    """The whole measurement: returns the report, which is then on disk and on the console."""
    file = Path(options.prompts) if options.prompts else shipped(DEFAULT_PROMPTS)
    _check(options)
    if not options.out and not Path(options.head).is_dir():  # else a mistyped name would become a folder
        raise UserError(f"no head at {options.head}: a folder that training wrote is expected")
    out = Path(options.out) if options.out else default_folder(Path(options.head))
    prompts = read_prompts(file)
    prompts = spread(prompts, options.limit) if options.limit else prompts
    named = list({str(plan): plan for plan in map(parse_plan, options.tree)}.values())
    _check_writable(out)

    name = options.target or head_target(Path(options.head))
    target = Target.load(name, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code)
    head = load_head(Path(options.head), target, force=options.force)
    plans = named or [head.tree]
    questions = _questions(prompts, target, options)

    comparisons = measure(target, head, plans, questions, options)
    verifying = dict(zip(comparisons, verify_costs(target, [plan.nodes + 1 for plan in plans]), strict=True))
    report = {
        "schema": 1,
        "target": target.name,
        "head": options.head,
        "kind": head.kind,
        "dtype": options.dtype,
        "device": str(target.device),
        "machine": describe_machine(target.device),
        "settings": _settings(options, file, plans, target),
        "suites": _suites(file.stem, comparisons, verifying),
        "examples": [_example(pair, plans[0], target) for pair in _first_of_each_kind(comparisons[str(plans[0])])],
        "runs": [row for tree, pairs in comparisons.items() for row in rows(pairs, tree)],
    }
    write_json(out / "report.json", report)
    write_html(report, out / "report.html")
    print_report(report, out)
    return report


# ------------------------------------------------------------------------------------------------ preparing


def default_folder(head: Path) -> Path:
    """A run keeps its head in RUN/head and its evaluation in RUN/eval."""
    return (head.parent if head.name == "head" else head) / "eval"


def _check(options: EvalOptions) -> None:
    Sampler(options.temperature, options.top_k, options.top_p)  # complains itself
    for name in ("limit", "generate_prompts"):
        if getattr(options, name) < 0:
            raise UserError(f"{name} {getattr(options, name)}: must be 0 or more")
    if options.max_new_tokens < 2:
        raise UserError(
            f"max_new_tokens {options.max_new_tokens}: must be 2 or more, since the prefill gives the first"
        )


def _check_writable(out: Path) -> None:
    """Refuse before the measurement, not after it."""
    make_folder(out)
    probe = out / ".writable"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write into the folder {out}: {reason(error)}") from error


def _questions(prompts: Sequence[Prompt], target: Target, options: EvalOptions) -> list[Question]:
    """Encode the prompts, and leave each no more new tokens than the target has positions for."""
    template = options.template_kwargs or head_template_kwargs(Path(options.head))
    questions = []
    for index, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt.text}]
        ids = chat.prompt_ids(target.tokenizer, messages, template)
        room = target.max_positions - len(ids)
        if room < 2:
            raise UserError(
                f"prompt {prompt.question_id} has {len(ids)} tokens: "
                f"too long for the {target.max_positions} positions of {target.name}"
            )
        questions.append(Question(prompt, ids, min(options.max_new_tokens, room), options.seed + index))
    return questions


# ------------------------------------------------------------------------------------------------ measuring

Comparisons = dict[str, list[Comparison]]  # by plan, in the order of the prompts


def measure(
    target: Target, head: Drafter, plans: Sequence[Plan], questions: Sequence[Question], options: EvalOptions
) -> Comparisons:
    """Decode every question in every mode, the modes in turns and in alternating order, after a warm-up."""
    decode = partial(_decode, target, options)
    modes: dict[str, Callable[[Question], Run]] = {PLAIN: decode}
    for plan in plans:
        modes[str(plan)] = partial(decode, head=head, plan=plan)
    with_generate = {p.question_id for p in spread([q.prompt for q in questions], options.generate_prompts)}

    for mode in modes.values():
        mode(_shortened(questions[0]))
    if with_generate:
        _decode_by_generate(target, options, _shortened(questions[0]))

    runs: dict[str, list[Run]] = {name: [] for name in modes}
    references: list[Reference | None] = []
    total = len(questions) * len(modes) + len(with_generate)
    with Progress("evaluate", total, unit="run") as progress:
        for turn, question in enumerate(questions):
            order = [*modes, GENERATE] if question.prompt.question_id in with_generate else [*modes]
            reference = None
            for name in order if turn % 2 == 0 else reversed(order):
                if name == GENERATE:
                    reference = _decode_by_generate(target, options, question)
                else:
                    runs[name].append(modes[name](question))
                progress.advance(1, note=_so_far(runs, str(plans[0])))
            references.append(reference)

    comparisons: Comparisons = {}
    for plan in plans:
        pairs = zip(questions, runs[PLAIN], runs[str(plan)], references, strict=True)
        comparisons[str(plan)] = [_compare(target, options, *pair) for pair in pairs]
    return comparisons


def _decode(
    target: Target,
    options: EvalOptions,
    question: Question,
    head: Drafter | None = None,
    plan: Plan | None = None,
) -> Run:
    commits: list[tuple[list[int], int]] = []
    sampler = _sampler(options, question)
    _synchronise(target.device)
    start = time.perf_counter()
    done = generate(
        target,
        question.ids,
        head,
        speculation=Speculation(plan),
        max_new_tokens=question.max_new_tokens,
        sampler=sampler,
        on_commit=lambda tokens, accepted: commits.append((list(tokens), accepted)),
    )
    _synchronise(target.device)
    return Run(done.tokens, time.perf_counter() - start, done.stats, commits)


def _decode_by_generate(target: Target, options: EvalOptions, question: Question) -> Reference:
    """transformers' own decoder on the same model object: what plain decoding has to keep up with."""
    ids = torch.tensor([question.ids], device=target.device)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if options.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
        torch.manual_seed(question.seed)
    _synchronise(target.device)
    start = time.perf_counter()
    whole: Any = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=question.max_new_tokens,
        eos_token_id=sorted(target.eos_ids) or None,
        pad_token_id=min(target.eos_ids, default=0),
        repetition_penalty=1.0,
        **sampling,
    )
    _synchronise(target.device)
    seconds = time.perf_counter() - start
    return Reference(whole[0, len(question.ids) :].tolist(), seconds, comparable=options.temperature == 0)


def _compare(
    target: Target,
    options: EvalOptions,
    question: Question,
    plain: Run,
    speculative: Run,
    reference: Reference | None,
) -> Comparison:
    """Plain beside speculative. Where they differ, plain is decoded once more, outside the clock, for the gap
    between its two best logits there."""
    found = divergence(question.prompt, plain.tokens, speculative.tokens)
    if found is not None:
        gaps = generate(
            target,
            question.ids,
            max_new_tokens=question.max_new_tokens,
            sampler=_sampler(options, question),
            keep_gaps=True,
        ).gaps
        found["gap"] = gaps[found["position"]] if found["position"] < len(gaps) else None
    return Comparison(question.prompt, plain, speculative, reference, found)


def verify_costs(target: Target, sizes: Sequence[int], past: int = 200, repeats: int = 7) -> list[float]:
    """v(n) for each n of `sizes`: time to verify n tokens over time for one, behind `past` cached ones.

    Measured apart from decoding, so that the report can print the speed-up it predicts beside the measured.
    """
    past = min(past, target.max_positions - max(sizes))
    cache = KVCache()
    target.forward(torch.zeros(1, past, dtype=torch.long, device=target.device), cache=cache)
    seconds: dict[int, list[float]] = {size: [] for size in (1, *sizes)}
    for _ in range(repeats):
        for size, taken in seconds.items():
            ids = torch.zeros(1, size, dtype=torch.long, device=target.device)
            visible = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
            _synchronise(target.device)
            start = time.perf_counter()
            out = target.forward(ids, cache=cache, visible=visible if size > 1 else None)
            target.logits(out.hidden[0]).max(-1)
            _synchronise(target.device)
            taken.append(time.perf_counter() - start)
            cache.crop(past)
    return [median(seconds[size]) / median(seconds[1]) for size in sizes]


def _sampler(options: EvalOptions, question: Question) -> Sampler:
    return Sampler(options.temperature, options.top_k, options.top_p, question.seed)


def _shortened(question: Question) -> Question:
    return Question(question.prompt, question.ids, min(WARM_UP_TOKENS, question.max_new_tokens), question.seed)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _so_far(runs: dict[str, list[Run]], tree: str) -> str:
    passes = sum(run.stats.passes for run in runs[tree])
    tau = metrics.acceptance_length(sum(run.stats.tokens for run in runs[tree]), passes)
    return "" if tau is None else f"{tau:.2f} tokens per pass"


# ------------------------------------------------------------------------------------------------ reporting


def _suites(stem: str, comparisons: Comparisons, verifying: dict[str, float]) -> dict[str, Any]:
    """The first tree under the file's name and by kind; each further tree as FILE@TREE."""
    found: dict[str, Any] = {}
    for index, (tree, pairs) in enumerate(comparisons.items()):
        name = stem if index == 0 else f"{stem}@{tree}"
        found[name] = suite(pairs, tree)
        found[name]["predicted"] = predicted(found[name], verifying[tree])
        if index == 0:
            for kind in dict.fromkeys(pair.prompt.category for pair in pairs):
                found[f"{stem}/{kind}"] = suite([pair for pair in pairs if pair.prompt.category == kind], tree)
    return found


def _settings(options: EvalOptions, file: Path, plans: Sequence[Plan], target: Target) -> dict[str, Any]:
    return asdict(options) | {
        "prompts": options.prompts or DEFAULT_PROMPTS,
        "tree": [str(plan) for plan in plans],
        "target_fingerprint": target.fingerprint,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the seconds depend on: processor, cores in use, accelerator, system."""
    machine: dict[str, Any] = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["accelerator"] = properties.name
        machine["accelerator_gib"] = round(properties.total_memory / 2**30)
    return machine


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _first_of_each_kind(pairs: Sequence[Comparison]) -> list[Comparison]:
    first: dict[str, Comparison] = {}
    for pair in pairs:
        first.setdefault(pair.prompt.category, pair)
    return list(first.values())


def _example(pair: Comparison, plan: Plan, target: Target) -> dict[str, Any]:
    """An answer in pieces [text, depth]: depth of the accepted draft, 0 where the target wrote it itself."""
    stream = TextStream(target.tokenizer)
    pieces: list[list[Any]] = []
    for tokens, accepted in pair.speculative.commits:
        for index, token in enumerate(tokens):
            text, depth = stream.push(token), index + 1 if index < accepted else 0
            if text:
                pieces.append([text, depth])
    if rest := stream.close():
        pieces.append([rest, 0])
    prompt = pair.prompt
    return {
        "prompt": prompt.question_id,
        "category": prompt.category,
        "text": prompt.text,
        "tree": str(plan),
        "pieces": pieces,
    }
