"""Measure decoding: encode the prompts, build the drafters with their trees, time the outputs and the target's passes.

Used by `spechead eval`, `spechead tune` and eval/bench_decode.py.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.decoding.generate import RANKED, Speculation, generate
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan, parse_tree
from spechead.drafters.base import Drafter, can_draft
from spechead.drafters.parse import parse_drafter
from spechead.errors import UserError
from spechead.evaluation.aggregate import Decoded, Reference
from spechead.evaluation.options import ModelOptions
from spechead.files import shipped
from spechead.options import Range
from spechead.target.cache import KVCache
from spechead.target.model import Target

DEFAULT_PROMPTS = "eval/prompts/held_out.jsonl"
WARM_UP_TOKENS = 32
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens of a pass that is timed

T = TypeVar("T")


@dataclass(kw_only=True)
class MeasureOptions(ModelOptions):
    """Which drafters are measured, with which trees, on which prompts."""

    max_new_tokens: Annotated[int, Range(2)] = 256
    """Longest answer, in tokens; the first is the prefill's."""
    drafter: list[str] = field(default_factory=list)
    """Training-free drafter, measured along with the head or, with a target, alone; may be given several times:
    prompt_lookup or prompt_lookup:ngram=3,match=latest (n-grams of the sequence itself), draft_model:FOLDER (a smaller
    model with the same tokenizer), self:0-9,20-29 (layers of the target), staged:self:20-29+self:0-1 (the second drafts
    for the first; its layers are counted within the first)."""
    tree: list[str] = field(default_factory=list)
    """Tree of drafts: chain:3, static:[[0],[1],[0,0]] or dynamic:nodes=15,depth=4,topk=3. Append ,floor=0.1 to stop
    expanding paths below that probability (prompt_lookup ignores it). The first is the main one; further ones are
    measured on the same prompts. Drafters that do not branch use the chains among them. Empty: each drafter's own; a
    head's is stored with it."""
    prompts: str = ""
    """JSONL file of prompts, {"question_id", "category", "turns"} per line. Empty: spechead's own 40."""
    limit: Annotated[int, Range(0)] = 0
    """Use only this many prompts, spread over the categories; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.drafter:
            parse_drafter(name)
        _ = self.plans

    @property
    def plans(self) -> list[Plan]:
        """The requested trees, each once."""
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
    """A prompt encoded for the target."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int
    seed: int = 0

    def shortened(self) -> "Question":
        """The same with few tokens to decode, for a warm-up."""
        return Question(self.prompt, self.ids, min(WARM_UP_TOKENS, self.max_new_tokens), self.seed)


def encode_prompts(prompts: Sequence[Prompt], target: Target, options: ModelOptions, seed: int = 0) -> list[Question]:
    """Encode the prompts, and limit the new tokens of each to the positions that the target has left. The seeds of the
    prompts are `seed`, `seed` + 1, ..."""
    questions = []
    for index, prompt in enumerate(prompts):
        ids = target.chat.prompt_ids([{"role": "user", "content": prompt.text}])
        room = target.max_positions - len(ids)
        if room < 2:
            raise UserError(
                f"option prompts: prompt {prompt.question_id} has {len(ids)} tokens, "
                f"too many for target {target.name!r}, which has {target.positions_text}"
            )
        questions.append(Question(prompt, ids, min(options.max_new_tokens, room), seed + index))
    return questions


@dataclass
class Mode:
    """One way to draft."""

    kind: str  # the kind of head, or the name given as option drafter
    drafter: Drafter
    plan: Plan
    requested: bool  # whether the plan was given as option tree, or is the drafter's own
    head: bool  # whether the drafter is a head

    @property
    def name(self) -> str:
        """Unique among the modes of a measurement."""
        return f"{self.kind} {self.plan}" if self.requested or self.head else self.kind


def make_modes(options: MeasureOptions, target: Target) -> list[Mode]:
    """The head with each tree, then each other drafter with each tree that it can draft."""
    drafters: dict[str, Drafter] = {}
    if options.head:
        head = options.load_head(target)
        drafters[head.kind] = head
    drafters |= {name: options.load_drafter(name, target) for name in options.drafter}
    modes = []
    for kind, drafter in drafters.items():
        requested = [plan for plan in options.plans if can_draft(drafter, plan)]
        is_head = kind not in options.drafter
        modes += [Mode(kind, drafter, plan, bool(requested), is_head) for plan in requested or [drafter.tree]]
    return modes


# ------------------------------------------------------------------------------------------------ decoding


def decode(
    target: Target,
    question: Question,
    drafter: Drafter | None = None,
    *,
    speculation: Speculation = RANKED,
    sampler: Sampler | None = None,
) -> Decoded:
    """Decode with spechead, plainly without a drafter."""
    commits: list[tuple[list[int], int]] = []
    generation, seconds = timed(
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
    return Decoded(generation.tokens, seconds, generation.stats, commits)


def decode_by_generate(target: Target, question: Question, **settings: Any) -> Reference:
    """Decode with transformers' generate on the same model object, greedily unless `settings` change that.

    What the model's own generation config sets is not applied, as in spechead's decoding.
    """
    model, ids = target.model, torch.tensor([question.ids], device=target.device)  # [1, P]
    own = model.generation_config
    config = type(own)(
        max_new_tokens=question.max_new_tokens,
        eos_token_id=sorted(target.eos_ids) or None,
        pad_token_id=min(target.eos_ids, default=0),
    )
    others = config.update(**settings)  # such as an assistant model
    model.generation_config = type(own)()  # else generate takes from it what the other one leaves open
    try:
        whole, seconds = timed(
            target,
            lambda: model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **others
            ),
        )
    finally:
        model.generation_config = own
    return Reference(whole[0, len(question.ids) :].tolist(), seconds)


def timed(target: Target, work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work`, and the seconds until the device has finished it."""
    target.synchronise()
    start = time.perf_counter()
    result = work()
    target.synchronise()
    return result, time.perf_counter() - start


def verify_costs(target: Target, sizes: Sequence[int], past: int = 200, repeats: int = 7) -> list[float]:
    """v(n) for each n of `sizes`: time to verify n tokens / time for one, after `past` cached tokens.

    Only the target's forward and its logits, measured outside decoding, so that a report can compare the predicted
    speed-up with the measured one.
    """
    past = max(1, min(past, target.max_positions - max(sizes)))
    sizes = [min(size, target.max_positions - past) for size in sizes]  # no larger tree is verified either
    cache = KVCache()
    source = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:  # int64 [1, count]; varied, so that a mixture uses all its experts
        return torch.randint(target.vocab_size, (1, count), generator=source).to(target.device)

    target.forward(tokens(past), cache=cache)

    def verify(ids: Tensor, visible: Tensor | None) -> None:
        target.logits(target.forward(ids, cache=cache, visible=visible).hidden[0])

    seconds: dict[int, list[float]] = {size: [] for size in (1, *sizes)}
    for _ in range(repeats):
        for size, times in seconds.items():
            ids = tokens(size)
            visible = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
            _, spent = timed(target, partial(verify, ids, visible if size > 1 else None))
            times.append(spent)
            cache.crop(past)
    return [median(seconds[size]) / median(seconds[1]) for size in sizes]


def passes_by_size(
    target: Target, questions: Sequence[Question], plain: Sequence[Decoded | Reference]
) -> tuple[int, dict[str, float]]:
    """The number of tokens before the middle of a typical answer, and v(n) by n after that many tokens."""
    middles = [len(question.ids) + len(output.tokens) // 2 for question, output in zip(questions, plain, strict=True)]
    sizes = [size for size in SIZES if size < target.max_positions]
    past = min(int(median(middles)), target.max_positions - sizes[-1])
    return past, dict(zip(map(str, sizes), verify_costs(target, sizes, past), strict=True))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What timings depend on: processor, threads, accelerator, system."""
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
