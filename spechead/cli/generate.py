"""`spechead generate`: stream one answer, colour its accepted drafts, and compare with plain decoding.

The answer goes to standard output, everything about it to standard error.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from spechead.decoding.detokenize import Decoder, Piece, StreamDetokenizer
from spechead.decoding.generate import RANKED, Generation, OnCommit, generate
from spechead.decoding.tree import Plan, parse_tree
from spechead.drafters.base import Drafter, can_draft
from spechead.drafters.parse import parse_drafter
from spechead.errors import UserError
from spechead.evaluation.aggregate import first_difference
from spechead.evaluation.options import DecodingOptions, note_ignored_generation
from spechead.files import clean
from spechead.heads import Head
from spechead.target.model import Target

# Of accepted drafts at depth 1, 2, ...; deeper ones take the last. Named colours follow the terminal's theme.
COLOURS = ["green", "cyan", "blue", "magenta", "red", "yellow"]


@dataclass(kw_only=True)
class GenerateOptions(DecodingOptions):
    """Decode one answer of the target, drafted by a head or by a training-free drafter."""

    prompt: str
    """The user's message."""
    system: str = ""
    """The system turn; empty: the default of the chat template."""
    drafter: str = ""
    """Training-free drafter, in place of a head: prompt_lookup or prompt_lookup:ngram=3,match=latest (n-grams of the
    sequence itself), draft_model:FOLDER (a smaller model with the same tokenizer), self:0-9,20-29 (layers of the
    target), staged:self:20-29+self:0-1 (the second drafts for the first; its layers are counted within the first)."""
    tree: str = ""
    """Tree of drafts: chain:3, static:[[0],[1],[0,0]] or dynamic:nodes=15,depth=4,topk=3. Append ,floor=0.1 to stop
    expanding paths below that probability (prompt_lookup ignores it). Empty: the drafter's own."""
    stop: list[str] = field(default_factory=list)
    """String that ends the answer and is not shown. May be given several times."""
    plain: bool = True
    """Decode once more without drafts and compare; --no-plain skips it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.head) == bool(self.drafter):
            raise UserError("option drafter: give either --head or --drafter")
        plan = self.plan
        self.speculation(plan)
        kind = parse_drafter(self.drafter).kind if self.drafter else Head
        if plan is not None and not can_draft(kind, plan):
            raise UserError(f"option tree: {plan} branches, {self.drafter} cannot; use chain:{plan.depth} or the like")
        if not self.prompt.strip():
            raise UserError("option prompt: must not be empty")
        self.prompt, self.system = clean(self.prompt), clean(self.system)

    @property
    def plan(self) -> Plan | None:
        return parse_tree(self.tree) if self.tree else None


def stream_answer(options: GenerateOptions) -> None:
    """Load the models, stream the answer, then print its statistics."""
    notes = Console(stderr=True, highlight=False)
    with notes.status("loading the target and its drafter"):
        target = options.load_target()
        drafter = options.load_drafter(options.drafter, target) if options.drafter else options.load_head(target)
    note_ignored_generation(target)
    ids = _encode_prompt(options, target)

    def decode(drafter: Drafter | None, on_commit: OnCommit | None = None, cap: int = 0) -> Generation:
        return generate(
            target,
            ids,
            drafter,
            speculation=options.speculation(options.plan) if drafter else RANKED,
            max_new_tokens=cap or options.max_new_tokens,
            sampler=options.sampler(),
            stop=options.stop,
            on_commit=on_commit,
        )

    decode(drafter, cap=8)  # warm up
    with Display(target.tokenizer, Console(highlight=False), notes, options.stop) as display:
        drafted = decode(drafter, display.commit)
    if options.plain and notes.is_terminal:
        notes.print("decoding once more without drafts, to compare", style="dim")  # no spinner: it costs time
    plain = decode(None) if options.plain else None
    notes.print(statistics(options, drafted, plain, display.seconds), soft_wrap=True)


def _encode_prompt(options: GenerateOptions, target: Target) -> list[int]:
    system = [{"role": "system", "content": options.system}] if options.system else []
    messages = [*system, {"role": "user", "content": options.prompt}]
    return target.chat.prompt_ids(messages)


class Display:
    """Prints the answer token by token: coloured on a terminal, plain text elsewhere."""

    def __init__(self, tokenizer: Decoder, console: Console, notes: Console, stop: Sequence[str] = ()) -> None:
        self.stream = StreamDetokenizer(tokenizer, stop)
        self.console = console
        self.notes = notes
        self.seconds = 0.0  # of passes, spent on printing and not on decoding
        self._begun = False

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            depths = [(f" {depth}", colour) for depth, colour in enumerate(COLOURS, start=1)]
            legend = Text.assemble("accepted drafts by depth:", *depths, " and deeper; the rest is the target's own")
            self.notes.print(legend, soft_wrap=True)
        return self

    def commit(self, tokens: Sequence[int], n_accepted: int) -> None:
        """Print the tokens that one pass committed; the first `n_accepted` are accepted drafts."""
        begin = time.perf_counter()
        for i, token in enumerate(tokens):
            self._show(self.stream.push(token, i + 1 if i < n_accepted else 0))
        if self._begun:  # the first token is the prefill's, whose time is in no figure
            self.seconds += time.perf_counter() - begin
        self._begun = True

    def __exit__(self, *_: object) -> None:
        self._show([*self.stream.close(), ("\n", 0)])

    def _show(self, pieces: Sequence[Piece]) -> None:
        for text, depth in pieces:
            if self.console.is_terminal:
                # A model can write escape sequences; a terminal must not obey them.
                text = text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")
                colour = COLOURS[min(depth, len(COLOURS)) - 1] if depth else ""
                self.console.out(text, style=colour, end="", highlight=False)
            else:
                self.console.file.write(text)
                self.console.file.flush()


def statistics(
    options: DecodingOptions, drafted: Generation, plain: Generation | None, display_seconds: float = 0.0
) -> str:
    """Tokens per pass and per second, against plain decoding where it ran, and whether the text is equal."""
    stats = drafted.stats
    if not stats.passes:
        return "the answer ended with its first token: nothing was drafted"
    ending = {"eos": "", "stop": "; ended by a stop string", "length": "; cut off at max_new_tokens"}
    mark = " (lossy)" if options.lossy else ""
    passes = f"{stats.tokens} tokens in {stats.passes} passes{ending[drafted.finish_reason]}"
    speed = tokens_per_second(drafted, display_seconds)
    lines = [
        f"{stats.tokens / stats.passes:.2f} tokens per pass{mark} ({passes})",
        f"{speed:.1f} tokens per second{mark}",
    ]
    if plain is not None:
        plain_speed = tokens_per_second(plain)
        lines[-1] += f", plain decoding {plain_speed:.1f}: x{speed / plain_speed:.2f}{mark}"
    rule = options.speculation().rule
    if options.lossy:
        lines.append(f"LOSSY: under the rule {rule} the text does not follow the target's distribution")
    elif not options.comparable:
        lines.append(f"under the rule {rule} the text follows plain decoding's distribution, with other samples")
    elif plain is not None:
        at = first_difference(drafted.tokens, plain.tokens)
        where = "is identical to" if at is None else f"from token {at} on differs from"
        lines.append(f"the text {where} plain decoding's")
    return "\n".join(lines)


def tokens_per_second(generation: Generation, display_seconds: float = 0.0) -> float:
    """Speed after the prefill."""
    stats = generation.stats
    seconds = sum(stats.seconds.values()) - stats.seconds["prefill"] - display_seconds
    return stats.tokens / seconds if seconds > 0 else math.nan
