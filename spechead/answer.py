"""`spechead generate`: stream one answer, colour what the head drafted, and compare with plain decoding.

The answer goes to standard output, everything about it to standard error. Knows nothing of how drafts are
made or verified.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from spechead.chat import prompt_ids
from spechead.errors import UserError
from spechead.formats.native import head_target, head_template_kwargs, load_head
from spechead.generate import Generation, Speculation, generate
from spechead.sampling import Sampler
from spechead.stream import Decoder, TextStream
from spechead.target import Target
from spechead.tree import parse_plan

# Of accepted drafts at depth 1, 2, ...; deeper ones take the last. Named colours follow the terminal's theme.
COLOURS = ["green", "cyan", "blue", "magenta", "red", "yellow"]
WARM_UP_TOKENS = 8


@dataclass
class AnswerOptions:
    """One answer of the target, drafted by a head."""

    head: str
    """Folder of the trained head."""
    prompt: str
    """What the user says."""
    target: str = ""
    """Language model; empty: the one the head was trained for."""
    system: str = ""
    """What the system turn says; empty: as the chat template has it."""
    tree: str = ""
    """Tree to draft, such as chain:3 or dynamic:nodes=31,depth=5,topk=4; empty: the head's own."""
    temperature: float = 0.0
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among the K likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1: all."""
    seed: int = 0
    """Of the sampling."""
    max_new_tokens: int = 256
    """Longest answer."""
    plain: bool = True
    """Decode once more without the head and compare; --no-plain leaves it out."""
    dtype: str = "float32"
    """Number format of the target's weights: float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}; empty: those of the head's training."""
    trust_remote_code: bool = False
    """Run modeling code that the model's own repository brings."""
    force: bool = False
    """Use the head with another target than its own."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"option max_new_tokens: must be at least 1, got {self.max_new_tokens}")
        if not self.prompt.strip():
            raise UserError("option prompt: is empty")


def answer(options: AnswerOptions) -> None:
    """Load, stream the answer, then say what it took."""
    notes = Console(stderr=True, highlight=False)
    with notes.status("loading the target and the head"):
        name = options.target or head_target(Path(options.head))
        target = Target.load(
            name, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
        head = load_head(Path(options.head), target, force=options.force)
    system = [{"role": "system", "content": options.system}] if options.system else []
    messages = [*system, {"role": "user", "content": options.prompt}]
    ids = prompt_ids(target.tokenizer, messages, options.template_kwargs or head_template_kwargs(Path(options.head)))

    def run(drafter: Any, on_commit: Any = None, tokens: int = options.max_new_tokens) -> Generation:
        sampler = Sampler(options.temperature, options.top_k, options.top_p, options.seed)
        tree = parse_plan(options.tree) if options.tree and drafter else None
        return generate(
            target,
            ids,
            drafter,
            speculation=Speculation(tree),
            max_new_tokens=tokens,
            sampler=sampler,
            on_commit=on_commit,
        )

    run(head, tokens=WARM_UP_TOKENS)
    with Display(target.tokenizer, Console(highlight=False), notes) as display:
        drafted = run(head, display.commit)
    if options.plain and notes.is_terminal:
        notes.print("decoding once more without the head, to compare", style="dim")  # no spinner: it costs time
    plain = run(None) if options.plain else None
    notes.print(closing(drafted, plain, display.seconds), soft_wrap=True)


class Display:
    """The answer on the terminal, token by token; plain text where there is none."""

    def __init__(self, tokenizer: Decoder, console: Console, notes: Console) -> None:
        self.stream = TextStream(tokenizer)
        self.console = console
        self.notes = notes
        self.seconds = 0.0  # spent on showing, which is not decoding

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            depths = [(f" {depth}", colour) for depth, colour in enumerate(COLOURS, start=1)]
            legend = Text.assemble("accepted drafts by depth:", *depths, " and deeper; the rest is the target's own")
            self.notes.print(legend, soft_wrap=True)
        return self

    def commit(self, tokens: Sequence[int], n_accepted: int) -> None:
        """Show what one pass committed: its first `n_accepted` tokens were drafts."""
        for i, token in enumerate(tokens):
            colour = COLOURS[min(i, len(COLOURS) - 1)] if i < n_accepted else ""
            self._show(self.stream.push(token), colour)

    def __exit__(self, *_: object) -> None:
        self._show(self.stream.close() + "\n")

    def _show(self, text: str, colour: str = "") -> None:
        begin = time.perf_counter()
        if self.console.is_terminal:
            # A model can write escape sequences; a terminal must not obey them.
            text = text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")
            self.console.out(text, style=colour, end="", highlight=False)
        else:
            self.console.file.write(text)
            self.console.file.flush()
        self.seconds += time.perf_counter() - begin


def closing(drafted: Generation, plain: Generation | None, display_seconds: float = 0.0) -> str:
    """Tokens per pass and per second, beside plain decoding where it ran."""
    stats = drafted.stats
    if not stats.passes:
        return "the first token ended the answer: nothing was drafted"
    passes = f"{stats.tokens} tokens in {stats.passes} passes"
    speed = tokens_per_second(drafted, display_seconds)
    lines = [
        f"{stats.tokens / stats.passes:.2f} tokens per pass ({passes})",
        f"{speed:.1f} tokens per second",
    ]
    if plain is not None:
        plain_speed = tokens_per_second(plain)
        lines[-1] += f", plain decoding {plain_speed:.1f}: x{speed / plain_speed:.2f}"
        at = first_difference(drafted.tokens, plain.tokens)
        where = "is identical to" if at is None else f"from token {at} on differs from"
        lines.append(f"the text {where} plain decoding's")
    return "\n".join(lines)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two sequences differ, an end included; None if they are equal."""
    return next((i for i, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def tokens_per_second(generation: Generation, display_seconds: float = 0.0) -> float:
    """Speed after the prefill."""
    stats = generation.stats
    seconds = sum(stats.seconds.values()) - stats.seconds["prefill"] - display_seconds
    return stats.tokens / seconds if seconds > 0 else math.nan
