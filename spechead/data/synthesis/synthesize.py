"""`spechead data synthesize`: generate training conversations with the target, both prompts and answers.

Prompted with the opening of a user turn, a chat model generates a user's message; prompted with that message, it
answers. A head must learn to draft the target's own answers. The work proceeds in rounds: prompts, filter, answers,
filter. Each round has its own seed and its own file in OUT.partial/, so that an interrupted command resumes and
produces the same rows.
"""

import dataclasses
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from spechead.data import chat
from spechead.data.prompts import read_prompts
from spechead.data.synthesis.batch_decode import Continuation, Draw, continue_batch, use_batch_attention
from spechead.data.synthesis.filters import SeenPrompts, refuse_answer, refuse_prompt
from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.errors import UserError
from spechead.files import claim, make_folder, read_json, remove, write_json, write_text
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.model import Target
from spechead.target.options import TargetOptions

PARTIAL_OPTIONS = "options.json"
BATCHES_PER_ROUND = 4
MIN_USABLE_SHARE = 0.02  # a target whose prompts pass the filters less often does not write user turns
Row = dict[str, Any]


@dataclass(kw_only=True)
class SynthesizeOptions(TargetOptions):
    """What to generate and how."""

    target: str = BUNDLED
    """Bundled target, local folder or hub id that writes prompts and answers."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto is bfloat16 where the device computes it natively."""
    out: Path = Path("synthetic.jsonl")
    """JSONL file to write; OUT.meta.json records how it was made, OUT.partial/ contains unfinished work."""
    count: Annotated[int, Range(1)] = 1500
    """Conversations to write."""
    seed: int = 0
    """Same seed, options and machine: same file."""
    kinds: str = ""
    """Comma-separated kinds to write, each with an optional weight (coding=2,maths); empty for all."""
    temperature: Annotated[float, Range(0)] = 0.0
    """Temperature of the answers; 0 is greedy."""
    prompt_temperature: Annotated[float, Range(above=0)] = 0.8
    """Temperature of the prompts."""
    top_k: Annotated[int, Range(1)] = 100
    """Most likely tokens that sampling chooses among."""
    top_p: Annotated[float, Range(above=0, most=1)] = 0.95
    """Probability mass, inside the top-k, that sampling chooses among."""
    max_prompt_tokens: Annotated[int, Range(8)] = 120
    """Prompts that do not end by themselves within this many tokens are dropped."""
    max_new_tokens: Annotated[int, Range(1)] = 256
    """Longest answer, in tokens; one that reaches it is kept and marked "finish": "length"."""
    keep_loops: bool = False
    """Keep answers that repeat themselves: a small model loops when it is served, too, and a head can draft that."""
    batch_size: Annotated[int, Range(1)] = 64
    """Rows decoded at once: more is faster until memory runs out."""
    exclude: str = ""
    """JSONL file of prompts, such as those of an evaluation; they and near-duplicates are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out.is_dir():
            raise UserError(f"option out: {self.out} is a folder, name a file")


# These may change when an interrupted command is resumed.
FREE_OPTIONS = {"out", "count", "exclude", "device", "trust_remote_code"}


@dataclass
class Steering:
    """The text before a user's message of one kind in the target's chat template, and the text that ends it."""

    opening: str
    closing: str


def synthesize(options: SynthesizeOptions) -> dict[str, Any]:
    """Write `options.out`; returns the content of OUT.meta.json."""
    weights = parse_kinds(options.kinds)
    excluded = [prompt.text for prompt in read_prompts(Path(options.exclude))] if options.exclude else []
    make_folder(options.out.resolve().parent)
    partial = options.out.with_name(options.out.name + ".partial")
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in FREE_OPTIONS}
    remedy = "keep the old value, or delete that folder"
    claim(partial / PARTIAL_OPTIONS, settings | {"dtype": options.precision}, remedy=remedy)
    gathered = Gathered(excluded, options.count)
    while not gathered.complete and round_file(partial, gathered.rounds).exists():
        gathered.add(read_json(round_file(partial, gathered.rounds)))
    target = options.load(pack=False)  # packing is for a handful of rows, here there are many
    use_batch_attention(target)
    with Progress("synthesize", options.count, "conversation", done=len(gathered.rows)) as progress:
        writer = Writer(options, target, weights, progress)
        while not gathered.complete:
            rows = writer.round(gathered.rounds, gathered.kinds, gathered.prompts)
            write_json(round_file(partial, gathered.rounds), rows)
            progress.advance(gathered.add(rows))
    meta = describe(options, target, gathered)
    write_text(options.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in gathered.rows))
    write_json(options.out.with_name(options.out.name + ".meta.json"), meta)
    remove(partial)
    dropped = describe_counts(gathered.dropped) or "nothing"
    print(f"{options.out}: {len(gathered.rows)} conversations; dropped: {dropped}")
    return meta


class Gathered:
    """The rows of all rounds so far, in order, without excluded prompts."""

    def __init__(self, excluded: list[str], count: int) -> None:
        self.rounds = 0
        self.rows: list[Row] = []
        self.prompts: list[str] = []  # including those of excluded rows, so that they are not written again
        self.kinds: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._count = count
        self._excluded = SeenPrompts()
        for prompt in excluded:
            self._excluded.add(prompt)

    @property
    def complete(self) -> bool:
        return len(self.rows) >= self._count

    def add(self, round_: dict[str, Any]) -> int:
        """Add the rows of the next round; returns how many were new."""
        before = len(self.rows)
        self.rounds += 1
        self.dropped.update(round_["dropped"])
        for row in round_["rows"]:
            prompt = row["messages"][0]["content"]
            self.prompts.append(prompt)
            self.kinds[row["meta"]["kind"]] += 1
            if self._excluded.contains(prompt):
                self.dropped["prompt is excluded"] += 1
            elif not self.complete:
                self.rows.append(row)
        return len(self.rows) - before


class Writer:
    """Generates rounds: prompts of all kinds, then answers."""

    def __init__(
        self, options: SynthesizeOptions, target: Target, weights: dict[str, float], progress: Progress
    ) -> None:
        self.options, self.target, self.weights, self.progress = options, target, weights, progress
        self.steerings = {
            kind: steering(target.tokenizer, KINDS[kind].system, options.template_kwargs) for kind in weights
        }
        # The token that ends a user's turn is not always one that ends an answer.
        self.prompt_stops = target.eos_ids | {
            token for s in self.steerings.values() for token in closing_tokens(target.tokenizer, s.closing)
        }

    def round(self, number: int, have: Counter[str], prompts: list[str]) -> dict[str, Any]:
        """One round: {"rows": [...], "dropped": {reason: count}}."""
        chooser = random.Random(f"{self.options.seed}/{number}")
        wanted = self.options.batch_size * BATCHES_PER_ROUND
        kinds = choose_kinds(self.weights, have, wanted, chooser)
        dropped: Counter[str] = Counter()
        kept = self.write_prompts(kinds, chooser, prompts, dropped)
        if len(kept) < MIN_USABLE_SHARE * wanted:
            raise UserError(
                f"target {self.target.name} wrote {len(kept)} usable prompts of {wanted} "
                f"({describe_counts(dropped)}): it does not write user turns, use a chat model"
            )
        rows = self.answer(kept, chooser, dropped)
        return {"rows": rows, "dropped": dict(dropped)}

    def write_prompts(
        self, kinds: list[str], chooser: random.Random, earlier: list[str], dropped: Counter[str]
    ) -> list[tuple[str, str]]:
        """(kind, prompt) pairs that passed the filters."""
        starts = [(kind, chooser.choice(KINDS[kind].openings)) for kind in kinds]
        texts = [self.steerings[kind].opening + opening for kind, opening in starts]
        draw = Draw(self.options.prompt_temperature, self.options.top_k, self.options.top_p)
        cap, seed = self.options.max_prompt_tokens, chooser.getrandbits(60)
        written = self.batches("writing prompts", texts, cap, self.prompt_stops, draw, seed)
        seen = SeenPrompts()
        for prompt in earlier:
            seen.add(prompt)
        kept = []
        for (kind, opening), continuation in zip(starts, written, strict=True):
            text, finished = self.cut(continuation, self.steerings[kind].closing)
            prompt = (opening + text).strip()
            reason = "prompt unfinished" if not finished else refuse_prompt(prompt) or seen.add(prompt)
            if reason:
                dropped[reason] += 1
            else:
                kept.append((kind, prompt))
        return kept

    def answer(self, prompts: list[tuple[str, str]], chooser: random.Random, dropped: Counter[str]) -> list[Row]:
        """Conversations whose answers passed the filters, in the order of the prompts."""
        draw = Draw(self.options.temperature, self.options.top_k, self.options.top_p)
        texts = [
            chat.prompt_text(self.target.tokenizer, [{"role": "user", "content": prompt}], self.options.template_kwargs)
            for _, prompt in prompts
        ]
        cap, seed = self.options.max_new_tokens, chooser.getrandbits(60)
        written = self.batches("answering", texts, cap, self.target.eos_ids, draw, seed)
        rows = []
        for (kind, prompt), continuation in zip(prompts, written, strict=True):
            text = self.target.tokenizer.decode(continuation.tokens, skip_special_tokens=False)
            reason = refuse_answer(text, continuation.tokens, self.options.keep_loops)
            if reason:
                dropped[reason] += 1
                continue
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            finish = "eos" if continuation.finished else "length"
            rows.append({"messages": messages, "meta": {"kind": kind, "finish": finish, "target": self.target.name}})
        return rows

    def batches(
        self, what: str, texts: list[str], cap: int, stops: frozenset[int], draw: Draw, seed: int
    ) -> list[Continuation]:
        """Continue all texts, those of similar length together; results in the order of the texts."""
        ids = [chat.tokenize(self.target.tokenizer, text) for text in texts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        size = self.options.batch_size
        done: dict[int, Continuation] = {}
        for number, start in enumerate(range(0, len(order), size)):
            self.progress.advance(0, note=f"{what} {start}/{len(order)}")
            rows = order[start : start + size]
            batch = [ids[i] for i in rows]
            written = continue_batch(
                self.target, batch, max_new_tokens=cap, stop_ids=stops, draw=draw, seed=seed + number
            )
            done.update(zip(rows, written, strict=True))
        return [done[i] for i in range(len(texts))]

    def cut(self, written: Continuation, closing: str) -> tuple[str, bool]:
        """The user's text, and whether the turn was ended, by a token or by the text of the closing."""
        text = self.target.tokenizer.decode(written.tokens, skip_special_tokens=False)
        marker = closing.strip()
        if not written.finished and marker and marker in text:
            return text[: text.index(marker)], True
        return text, written.finished


# ------------------------------------------------------------------------------------------------ steering


def steering(tokenizer: Any, system: str, template_kwargs: dict[str, Any] | None = None) -> Steering:
    """Find the opening and the closing of a user turn in any template, by rendering a sentinel as its content."""
    user = {"role": "user", "content": chat.SENTINEL}
    messages = [{"role": "system", "content": system}, user] if system else [user]
    try:
        text = chat.render(tokenizer, messages, template_kwargs)
    except UserError:
        # Templates without a system turn refuse it: its text then opens the user turn.
        joined = [{"role": "user", "content": f"{system}\n\n{chat.SENTINEL}"}]
        text = chat.render(tokenizer, joined, template_kwargs)
    opening, sentinel, closing = text.partition(chat.SENTINEL)
    if not sentinel:
        raise UserError("option target: its chat template drops the content of a user turn, use a chat model")
    return Steering(opening, closing)


def closing_tokens(tokenizer: Any, closing: str) -> set[int]:
    """The control token that a closing begins with, if any."""
    first = chat.leading_control(tokenizer, closing.lstrip())
    return set() if first is None else {first}


def choose_kinds(weights: dict[str, float], have: Counter[str], wanted: int, chooser: random.Random) -> list[str]:
    """Kinds of the next `wanted` prompts: kinds with less than their share of the rows so far are drawn more often."""
    total = sum(have.values()) + wanted
    scale = total / sum(weights.values())
    missing = [max(0.0, weight * scale - have[kind]) for kind, weight in weights.items()]
    return chooser.choices(list(weights), missing, k=wanted)


def parse_kinds(text: str) -> dict[str, float]:
    """`coding=2,maths` -> weights; empty: all kinds with the weights of the table."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, weight = part.partition("=")
        if kind not in KINDS:
            raise UserError(f"option kinds: {kind} is unknown, use {', '.join(KINDS)}")
        try:
            weights[kind] = float(weight) if weight else KINDS[kind].weight
        except ValueError:
            weights[kind] = 0.0
        if not 0 < weights[kind] < float("inf"):
            raise UserError(f"option kinds: the weight of {part} must be a number above 0")
    return weights or {kind: entry.weight for kind, entry in KINDS.items()}


# ------------------------------------------------------------------------------------------------ state


def round_file(partial: Path, number: int) -> Path:
    return partial / f"round-{number:05d}.json"


def describe(options: SynthesizeOptions, target: Target, gathered: Gathered) -> dict[str, Any]:
    """The content of OUT.meta.json: enough to reproduce the file and to assess it."""
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("out", "device", "dtype")}
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": options.precision,
        "options": settings,
        "conversations": len(gathered.rows),
        "kinds": dict(sorted(Counter(row["meta"]["kind"] for row in gathered.rows).items())),
        "finish": dict(Counter(row["meta"]["finish"] for row in gathered.rows)),
        "dropped": dict(gathered.dropped.most_common()),
    }


def describe_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
