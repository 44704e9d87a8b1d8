"""What `spechead eval`, `spechead tune` and eval/bench_decode.py do alike: prompts made ready, drafters and their
trees, timed runs, what a pass costs.

Knows nothing of what is compared with what, or of reports.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from spechead.data import chat
from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.decoding.generate import RANKED, Speculation, generate
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan, parse_tree
from spechead.drafters.base import Drafter, can_draft
from spechead.drafters.parse import read_drafter
from spechead.errors import UserError
from spechead.evaluation.aggregate import Reference, Run
from spechead.evaluation.options import ModelOptions
from spechead.files import shipped
from spechead.target.cache import KVCache
from spechead.target.model import Target

DEFAULT_PROMPTS = "eval/prompts/held_out.jsonl"
WARM_UP_TOKENS = 32
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of a pass that is timed

T = TypeVar("T")


@dataclass(kw_only=True)
class MeasureOptions(ModelOptions):
    """What drafts, in which form, on which prompts."""

    drafter: list[str] = field(default_factory=list)
    """Drafter without training, measured beside the head or, with a target, alone. May be given several times.
    prompt_lookup (n-grams of the text itself; as it stands prompt_lookup:ngram=3,match=first, or match=latest);
    draft_model:FOLDER (a smaller model of the same tokenizer); self:0-9,20-29 (the target's layers that are kept);
    staged:self:20-29+self:0-1 (the drafting of the first is itself sped up by the second, prompt_lookup or a model;
    layers of the second count those that the first keeps: here they are 20 and 21)."""
    tree: list[str] = field(default_factory=list)
    """Shape to draft: chain:3, static:[[0],[1],[0,0]] or dynamic:nodes=15,depth=4,topk=3. With ,floor=0.1 behind it,
    nothing is drafted behind a path less probable than that (prompt_lookup does not look at it). The first is the main
    one; further ones are measured beside it on the same prompts. Drafters that do not branch take the chains among
    them. Empty: each drafter's own; a head's is stored with it."""
    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} a line. Empty: spechead's own 40."""
    limit: int = 0
    """Use only this many prompts, spread over the kinds; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.drafter:
            read_drafter(name)
        _ = self.plans
        if self.limit < 0:
            raise UserError(f"limit {self.limit}: must be 0 or more")
        if self.max_new_tokens < 2:
            raise UserError(
                f"max_new_tokens {self.max_new_tokens}: must be 2 or more, since the prefill gives the first"
            )

    @property
    def plans(self) -> list[Plan]:
        """The trees asked for, each once."""
        return list({str(plan): plan for plan in map(parse_tree, self.tree)}.values())

    @property
    def prompt_file(self) -> Path:
        return Path(self.prompts) if self.prompts else shipped(DEFAULT_PROMPTS)

    def read_prompts(self) -> list[Prompt]:
        prompts = read_prompts(self.prompt_file)
        return balanced(prompts, self.limit) if self.limit else prompts


# ------------------------------------------------------------------------------------------------ preparing


@dataclass
class Question:
    """A prompt made ready for the target."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int
    seed: int = 0

    def shortened(self) -> "Question":
        """For a warm-up."""
        return Question(self.prompt, self.ids, min(WARM_UP_TOKENS, self.max_new_tokens), self.seed)


def questions(prompts: Sequence[Prompt], target: Target, options: ModelOptions, seed: int = 0) -> list[Question]:
    """Encode the prompts, and leave each no more new tokens than the target has positions for. The first prompt's seed
    is `seed`, the others' follow."""
    template = options.template()
    found = []
    for index, prompt in enumerate(prompts):
        ids = chat.prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.text}], template)
        room = target.max_positions - len(ids)
        if room < 2:
            raise UserError(
                f"prompt {prompt.question_id} has {len(ids)} tokens: "
                f"too long for the {target.max_positions} positions of {target.name}"
            )
        found.append(Question(prompt, ids, min(options.max_new_tokens, room), seed + index))
    return found


@dataclass
class Mode:
    """One way to draft."""

    kind: str  # of the drafter: that of the head, or the name it was asked for by
    drafter: Drafter
    plan: Plan
    asked: bool  # whether the plan was asked for, or is the drafter's own
    head: bool

    @property
    def name(self) -> str:
        """No two modes of a measurement have the same."""
        return f"{self.kind} {self.plan}" if self.asked or self.head else self.kind


def modes(options: MeasureOptions, target: Target) -> list[Mode]:
    """The head with each tree, then each other drafter with each tree that it can draft."""
    drafters: dict[str, Drafter] = {}
    if options.head:
        head = options.load_head(target)
        drafters[head.kind] = head
    drafters |= {name: options.load_drafter(name, target) for name in options.drafter}
    found = []
    for kind, drafter in drafters.items():
        asked = [plan for plan in options.plans if can_draft(drafter, plan)]
        is_head = kind not in options.drafter
        found += [Mode(kind, drafter, plan, bool(asked), is_head) for plan in asked or [drafter.tree]]
    return found


# ------------------------------------------------------------------------------------------------ decoding


def decode(
    target: Target,
    question: Question,
    drafter: Drafter | None = None,
    *,
    speculation: Speculation = RANKED,
    sampler: Sampler | None = None,
) -> Run:
    """The answer by our own decoder, plain without a drafter."""
    commits: list[tuple[list[int], int]] = []
    done, seconds = timed(
        target,
        lambda: generate(
            target,
            question.ids,
            drafter,
            speculation=speculation,
            max_new_tokens=question.max_new_tokens,
            sampler=sampler,
            on_commit=lambda tokens, accepted: commits.append((list(tokens), accepted)),
        ),
    )
    return Run(done.tokens, seconds, done.stats, commits)


def decode_by_generate(target: Target, question: Question, **settings: Any) -> Reference:
    """The answer by transformers' own decoder on the same model object, greedily unless `settings` say otherwise."""
    ids = torch.tensor([question.ids], device=target.device)  # [1, P]
    greedy: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
    greedy |= dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    whole, seconds = timed(
        target,
        lambda: target.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question.max_new_tokens,
            eos_token_id=sorted(target.eos_ids) or None,
            pad_token_id=min(target.eos_ids, default=0),
            **greedy | settings,
        ),
    )
    return Reference(whole[0, len(question.ids) :].tolist(), seconds)


def timed(target: Target, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and the seconds until the device has done it."""
    target.synchronise()
    start = time.perf_counter()
    result = work()
    target.synchronise()
    return result, time.perf_counter() - start


def verify_costs(target: Target, sizes: Sequence[int], past: int = 200, repeats: int = 7) -> list[float]:
    """v(n) for each n of `sizes`: time to verify n tokens over time for one, behind `past` cached ones.

    The target's forward and its logits alone, measured apart from decoding, so that a report can print the speed-up
    that follows beside the measured one.
    """
    past = max(1, min(past, target.max_positions - max(sizes)))
    sizes = [min(size, target.max_positions - past) for size in sizes]  # a larger tree is never verified either
    cache = KVCache()
    chooser = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:  # int64 [1, count]; of all kinds, so that a mixture asks all its experts
        return torch.randint(target.vocab_size, (1, count), generator=chooser).to(target.device)

    target.forward(tokens(past), cache=cache)

    def verify(ids: Tensor, visible: Tensor | None) -> None:
        target.logits(target.forward(ids, cache=cache, visible=visible).hidden[0])

    seconds: dict[int, list[float]] = {size: [] for size in (1, *sizes)}
    for _ in range(repeats):
        for size, taken in seconds.items():
            ids = tokens(size)
            visible = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
            _, spent = timed(target, partial(verify, ids, visible if size > 1 else None))
            taken.append(spent)
            cache.crop(past)
    return [median(seconds[size]) / median(seconds[1]) for size in sizes]


def passes_by_size(
    target: Target, asked: Sequence[Question], plain: Sequence[Run | Reference]
) -> tuple[int, dict[str, float]]:
    """v(n) by n, behind as many tokens as stand before the middle of a typical answer, and how many these are."""
    middles = [len(question.ids) + len(run.tokens) // 2 for question, run in zip(asked, plain, strict=True)]
    sizes = [size for size in SIZES if size < target.max_positions]
    past = min(int(median(middles)), target.max_positions - sizes[-1])
    return past, dict(zip(map(str, sizes), verify_costs(target, sizes, past), strict=True))


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
