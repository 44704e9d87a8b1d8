"""Measure a head and other drafters: plain and speculative decoding of the same prompts, interleaved, in one process.

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
from typing import Any, TypeVar

import torch
from torch import Tensor

from spechead import __version__, chat, metrics
from spechead.cache import KVCache
from spechead.decoding import DecodingOptions
from spechead.drafters.base import Drafter
from spechead.drafters.named import parse_drafter
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.staged import Staged
from spechead.errors import UserError
from spechead.files import make_folder, reason, shipped, write_json
from spechead.generate import RANKED, Speculation, generate
from spechead.log import Progress
from spechead.page import write_html
from spechead.prompts import Prompt, read_prompts, spread
from spechead.report import print_report
from spechead.stream import TextStream
from spechead.suites import Comparison, Reference, Run, divergence, predicted, rows, suite
from spechead.target import Target
from spechead.tree import Plan, Static, chain, parse_plan

DEFAULT_PROMPTS = "eval/prompts/held_out.jsonl"
WARM_UP_TOKENS = 32
GENERATE = "generate"
PLAIN = "plain"
CHAINS_ONLY = (PromptLookup, Staged)  # drafters that do not branch, whatever tree they are asked for

T = TypeVar("T")


@dataclass(kw_only=True)
class EvalOptions(DecodingOptions):
    """How many tokens a pass yields, how much faster that is, and whether the text stays the same."""

    drafter: list[str] = field(default_factory=list)
    """Drafter without training, measured beside the head or, with a target, alone: prompt_lookup, draft_model:FOLDER,
    self:0-9,20-29 (the target's layers that are kept), staged:self:0-9+prompt_lookup. May be given several times."""
    tree: list[str] = field(default_factory=list)
    """Shape to draft, such as chain:3 or dynamic:nodes=15,depth=4,topk=3. The first is the main one; further ones are
    measured beside it on the same prompts. Drafters that do not branch take the chains among them. Empty: each
    drafter's own; a head's is stored with it."""
    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} a line. Empty: spechead's own 40."""
    limit: int = 0
    """Use only this many prompts, spread over the kinds; 0: all."""
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
        for name in ("limit", "generate_prompts"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} {getattr(self, name)}: must be 0 or more")
        if self.max_new_tokens < 2:
            raise UserError(
                f"max_new_tokens {self.max_new_tokens}: must be 2 or more, since the prefill gives the first"
            )

    @property
    def plans(self) -> list[Plan]:
        """The trees asked for, each once."""
        return list({str(plan): plan for plan in map(parse_plan, self.tree)}.values())


@dataclass
class Question:
    """A prompt made ready for the target."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass
class Mode:
    """One way to draft that is compared with plain decoding."""

    name: str  # in the report; no two have the same
    kind: str  # of the drafter
    drafter: Drafter
    plan: Plan
    speculation: Speculation
    lossy: bool

    def about(self) -> dict[str, Any]:
        """What the report's numbers of this mode are marked with."""
        return {"drafter": self.kind, "tree": str(self.plan), "rule": self.speculation.rule, "lossy": self.lossy}


def evaluate(options: EvalOptions) -> dict[str, Any]:
    """The whole measurement: returns the report, which is then on disk and on the console."""
    file = Path(options.prompts) if options.prompts else shipped(DEFAULT_PROMPTS)
    out = _out_folder(options)
    prompts = read_prompts(file)
    prompts = spread(prompts, options.limit) if options.limit else prompts
    _check_writable(out)

    target = options.load_target()
    modes = _modes(options, target)
    questions = _questions(prompts, target, options)

    comparisons = measure(target, modes, questions, options)
    verifying = verify_costs(target, [mode.plan.nodes + 1 for mode in modes])
    report = {
        "schema": 1,
        "target": target.name,
        "head": options.head,
        "kind": modes[0].kind,
        "dtype": options.dtype,
        "device": str(target.device),
        "machine": describe_machine(target.device),
        "settings": _settings(options, file, modes, target),
        "suites": _suites(file.stem, modes, comparisons, verifying),
        "examples": [_example(pair, modes[0], target) for pair in _first_of_each_kind(comparisons[modes[0].name])],
        "runs": [row for mode in modes for row in rows(comparisons[mode.name], mode.about())],
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


def _modes(options: EvalOptions, target: Target) -> list[Mode]:
    """The head with each tree, then each other drafter with each tree that it can draft."""
    drafters: dict[str, Drafter] = {}
    if options.head:
        head = options.load_head(target)
        drafters[head.kind] = head
    drafters |= {name: parse_drafter(name, target) for name in options.drafter}
    modes = []
    for kind, drafter in drafters.items():
        asked = [plan for plan in options.plans if _is_chain(plan) or not isinstance(drafter, CHAINS_ONLY)]
        for plan in asked or [drafter.tree]:
            name = f"{kind} {plan}" if asked else kind
            if kind not in options.drafter:  # the head
                name = str(plan)
            modes.append(Mode(name, kind, drafter, plan, options.speculation(plan), options.lossy))
    return modes


def _is_chain(plan: Plan) -> bool:
    return isinstance(plan, Static) and plan.choices == chain(plan.depth).choices


def _questions(prompts: Sequence[Prompt], target: Target, options: EvalOptions) -> list[Question]:
    """Encode the prompts, and leave each no more new tokens than the target has positions for."""
    template = options.template()
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

Comparisons = dict[str, list[Comparison]]  # by the name of the mode, in the order of the prompts


def measure(target: Target, modes: Sequence[Mode], questions: Sequence[Question], options: EvalOptions) -> Comparisons:
    """Decode every question plainly and in every mode, in turns and in alternating order, after a warm-up."""
    decode = partial(_decode, target, options)
    decoders: dict[str, Callable[[Question], Run]] = {PLAIN: decode}
    decoders |= {mode.name: partial(decode, mode=mode) for mode in modes}
    with_generate = {p.question_id for p in spread([q.prompt for q in questions], options.generate_prompts)}

    for decoder in decoders.values():
        decoder(_shortened(questions[0]))
    if with_generate:
        _decode_by_generate(target, options, _shortened(questions[0]))

    runs: dict[str, list[Run]] = {name: [] for name in decoders}
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
                    runs[name].append(decoders[name](question))
                progress.advance(1, note=_so_far(runs[modes[0].name]))
            references.append(reference)

    comparisons: Comparisons = {}
    for mode in modes:
        pairs = zip(questions, runs[PLAIN], runs[mode.name], references, strict=True)
        comparisons[mode.name] = [_compare(target, options, *pair) for pair in pairs]
    return comparisons


def _decode(target: Target, options: EvalOptions, question: Question, mode: Mode | None = None) -> Run:
    commits: list[tuple[list[int], int]] = []
    done, seconds = _timed(
        target,
        lambda: generate(
            target,
            question.ids,
            mode.drafter if mode else None,
            speculation=mode.speculation if mode else RANKED,
            max_new_tokens=question.max_new_tokens,
            sampler=options.sampler(question.seed),
            on_commit=lambda tokens, accepted: commits.append((list(tokens), accepted)),
        ),
    )
    return Run(done.tokens, seconds, done.stats, commits)


def _decode_by_generate(target: Target, options: EvalOptions, question: Question) -> Reference:
    """transformers' own decoder on the same model object: what plain decoding has to keep up with."""
    ids = torch.tensor([question.ids], device=target.device)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    if options.temperature > 0:
        cuts = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p or None}
        sampling = {"do_sample": True, "temperature": options.temperature, **cuts}
        torch.manual_seed(question.seed)
    whole, seconds = _timed(
        target,
        lambda: target.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question.max_new_tokens,
            eos_token_id=sorted(target.eos_ids) or None,
            pad_token_id=min(target.eos_ids, default=0),
            repetition_penalty=options.repetition_penalty,
            **sampling,
        ),
    )
    return Reference(whole[0, len(question.ids) :].tolist(), seconds, comparable=options.temperature == 0)


def _timed(target: Target, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and the seconds until the device has done it."""
    target.synchronise()
    start = time.perf_counter()
    result = work()
    target.synchronise()
    return result, time.perf_counter() - start


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


def verify_costs(target: Target, sizes: Sequence[int], past: int = 200, repeats: int = 7) -> list[float]:
    """v(n) for each n of `sizes`: time to verify n tokens over time for one, behind `past` cached ones.

    Measured apart from decoding, so that the report can print the speed-up it predicts beside the measured.
    """
    past = min(past, target.max_positions - max(sizes))
    cache = KVCache()
    target.forward(torch.zeros(1, past, dtype=torch.long, device=target.device), cache=cache)

    def verify(ids: Tensor, visible: Tensor | None) -> None:
        out = target.forward(ids, cache=cache, visible=visible)
        target.logits(out.hidden[0]).max(-1)

    seconds: dict[int, list[float]] = {size: [] for size in (1, *sizes)}
    for _ in range(repeats):
        for size, taken in seconds.items():
            ids = torch.zeros(1, size, dtype=torch.long, device=target.device)
            visible = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
            _, spent = _timed(target, partial(verify, ids, visible if size > 1 else None))
            taken.append(spent)
            cache.crop(past)
    return [median(seconds[size]) / median(seconds[1]) for size in sizes]


def _shortened(question: Question) -> Question:
    return Question(question.prompt, question.ids, min(WARM_UP_TOKENS, question.max_new_tokens), question.seed)


def _so_far(runs: Sequence[Run]) -> str:
    passes = sum(run.stats.passes for run in runs)
    tau = metrics.acceptance_length(sum(run.stats.tokens for run in runs), passes)
    return "" if tau is None else f"{tau:.2f} tokens per pass"


# ------------------------------------------------------------------------------------------------ reporting


def _suites(stem: str, modes: Sequence[Mode], comparisons: Comparisons, verifying: Sequence[float]) -> dict[str, Any]:
    """The first mode under the file's name and by kind of prompt; each further mode as FILE@MODE."""
    found: dict[str, Any] = {}
    for mode, v in zip(modes, verifying, strict=True):
        name, pairs = f"{stem}@{mode.name}" if found else stem, comparisons[mode.name]
        found[name] = suite(pairs, mode.about())
        found[name]["predicted"] = predicted(found[name], v)
        if name == stem:
            for kind in dict.fromkeys(pair.prompt.category for pair in pairs):
                chosen = [pair for pair in pairs if pair.prompt.category == kind]
                found[f"{stem}/{kind}"] = suite(chosen, mode.about())
    return found


def _settings(options: EvalOptions, file: Path, modes: Sequence[Mode], target: Target) -> dict[str, Any]:
    return asdict(options) | {
        "prompts": options.prompts or DEFAULT_PROMPTS,
        "tree": list(dict.fromkeys(str(mode.plan) for mode in modes)),
        "rule": modes[0].speculation.rule,
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


def _example(pair: Comparison, mode: Mode, target: Target) -> dict[str, Any]:
    """An answer in pieces [text, depth]: depth of the accepted draft, 0 where the target wrote it itself."""
    stream = TextStream(target.tokenizer)
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
