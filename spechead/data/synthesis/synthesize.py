"""`spechead data synthesize`: training conversations that the target writes, prompts and answers.

A chat model that is given the opening of a user turn writes a user's message; given that message, it answers.
Answers of the target itself are what a head must learn to draft. Work proceeds in rounds: write prompts,
filter, answer, filter. Each round has its own seed and its own file in OUT.partial/, so that an interrupted
command goes on where it was and comes to the same rows. Knows nothing of training.
"""

import dataclasses
import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spechead.data import chat
from spechead.data.prompts import read_prompts
from spechead.data.synthesis.batch_decode import Draw, Written, continue_batch, use_batch_attention
from spechead.data.synthesis.filters import SeenPrompts, refuse_answer, refuse_prompt
from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.errors import UserError
from spechead.files import make_folder, read_json, write_json, write_text
from spechead.progress import Progress
from spechead.target.loading import choose_device, native_bfloat16
from spechead.target.model import Target

PARTIAL_OPTIONS = "options.json"
BATCHES_PER_ROUND = 4
FEWEST_PER_ROUND = 0.02  # a target that keeps a smaller share of its prompts cannot do this
Row = dict[str, Any]


@dataclass
class SynthesizeOptions:
    """What to write and how."""

    out: Path = Path("synthetic.jsonl")
    """JSONL file to write; OUT.meta.json tells how it was made, OUT.partial/ holds unfinished work."""
    count: int = 1500
    """Conversations to write."""
    target: str = "smollm2-135m"
    """Embedded target, local folder or hub id that writes prompts and answers."""
    adapter: str = ""
    """Folder or hub id of a peft adapter to merge into the target."""
    seed: int = 0
    """Same seed, options and machine: same file."""
    kinds: str = ""
    """Comma-separated kinds to write, each with an optional weight (coding=2,maths); empty for all."""
    temperature: float = 0.0
    """Temperature of the answers; 0 is greedy."""
    prompt_temperature: float = 0.8
    """Temperature of the prompts."""
    top_k: int = 100
    """Most likely tokens that sampling chooses among."""
    top_p: float = 0.95
    """Probability mass, inside the top-k, that sampling chooses among."""
    max_prompt_tokens: int = 120
    """Prompts that do not end by themselves within this many tokens are dropped."""
    max_new_tokens: int = 256
    """Cap on an answer; one that reaches it is kept and marked "finish": "length"."""
    keep_loops: bool = False
    """Keep answers that repeat themselves: a small model loops when it is served, too, and a head can draft that."""
    batch_size: int = 64
    """Rows decoded at once: higher is faster until memory ends."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto is bfloat16 where the processor multiplies it natively."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}."""
    trust_remote_code: bool = False
    """Let a hub model run its own Python code."""
    exclude: str = ""
    """JSONL file of prompts that must not be in the data, nor nearly: those of an evaluation."""


# What may change between the two halves of an interrupted command without mixing two kinds of data.
FREE_OPTIONS = {"out", "count", "exclude", "device", "trust_remote_code"}


@dataclass
class Steering:
    """What stands before a user's message of one kind in the target's own template, and what ends it."""

    opening: str
    closing: str


def synthesize(options: SynthesizeOptions) -> dict[str, Any]:
    """Write `options.out`; returns what OUT.meta.json holds."""
    check(options)
    weights = parse_kinds(options.kinds)
    excluded = [prompt.text for prompt in read_prompts(Path(options.exclude))] if options.exclude else []
    make_folder(options.out.resolve().parent)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16(choose_device(options.device)) else "float32"
    partial = options.out.with_name(options.out.name + ".partial")
    claim(partial, options, dtype)
    gathered = Gathered(excluded, options.count)
    while not gathered.complete and round_file(partial, gathered.rounds).exists():
        gathered.add(read_json(round_file(partial, gathered.rounds)))
    target = load_target(options, dtype)
    with Progress("synthesize", options.count, "conversation", done=len(gathered.rows)) as progress:
        writer = Writer(options, target, weights, progress)
        while not gathered.complete:
            round_ = writer.round(gathered.rounds, gathered.kinds, gathered.prompts)
            write_json(round_file(partial, gathered.rounds), round_)
            progress.advance(gathered.add(round_))
    meta = describe(options, dtype, target, gathered)
    write_text(options.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in gathered.rows))
    write_json(options.out.with_name(options.out.name + ".meta.json"), meta)
    shutil.rmtree(partial)
    dropped = describe_counts(gathered.dropped) or "nothing"
    print(f"{options.out}: {len(gathered.rows)} conversations; dropped: {dropped}")
    return meta


class Gathered:
    """The rows of all rounds so far, in order; repeats across rounds and excluded prompts are left out."""

    def __init__(self, excluded: list[str], count: int) -> None:
        self.rounds = 0
        self.rows: list[Row] = []
        self.prompts: list[str] = []  # also those of rows left out, so that they are not written again
        self.kinds: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._count = count
        self._excluded = SeenPrompts()
        for prompt in excluded:
            self._excluded.refuse(prompt)

    @property
    def complete(self) -> bool:
        return len(self.rows) >= self._count

    def add(self, round_: dict[str, Any]) -> int:
        """Take the rows of the next round; returns how many were new."""
        before = len(self.rows)
        self.rounds += 1
        self.dropped.update(round_["dropped"])
        for row in round_["rows"]:
            prompt = row["messages"][0]["content"]
            self.prompts.append(prompt)
            self.kinds[row["meta"]["kind"]] += 1
            if self._excluded.knows(prompt):
                self.dropped["prompt is excluded"] += 1
            elif not self.complete:
                self.rows.append(row)
        return len(self.rows) - before


class Writer:
    """Writes rounds: prompts of all kinds, then answers."""

    def __init__(
        self, options: SynthesizeOptions, target: Target, weights: dict[str, float], progress: Progress
    ) -> None:
        self.options, self.target, self.weights, self.progress = options, target, weights, progress
        self.steerings = {
            kind: steering(target.tokenizer, KINDS[kind].system, options.template_kwargs) for kind in weights
        }
        # The token that ends a user's turn need not be one that ends an answer.
        self.prompt_stops = target.eos_ids | {
            token for s in self.steerings.values() for token in first_special(target.tokenizer, s.closing)
        }

    def round(self, number: int, have: Counter[str], prompts: list[str]) -> dict[str, Any]:
        """One round: {"rows": [...], "dropped": {reason: count}}."""
        chooser = random.Random(f"{self.options.seed}/{number}")
        wanted = self.options.batch_size * BATCHES_PER_ROUND
        kinds = share_out(self.weights, have, wanted, chooser)
        dropped: Counter[str] = Counter()
        kept = self.write_prompts(kinds, chooser, prompts, dropped)
        if len(kept) < FEWEST_PER_ROUND * wanted:
            raise UserError(
                f"target {self.target.name} wrote {len(kept)} usable prompts of {wanted} "
                f"({describe_counts(dropped)}): it does not write user turns; take a chat model"
            )
        rows = self.answer(kept, chooser, dropped)
        return {"rows": rows, "dropped": dict(dropped)}

    def write_prompts(
        self, kinds: list[str], chooser: random.Random, earlier: list[str], dropped: Counter[str]
    ) -> list[tuple[str, str]]:
        """(kind, prompt) that passed the filters."""
        starts = [(kind, chooser.choice(KINDS[kind].openings)) for kind in kinds]
        texts = [self.steerings[kind].opening + opening for kind, opening in starts]
        draw = Draw(self.options.prompt_temperature, self.options.top_k, self.options.top_p)
        cap, seed = self.options.max_prompt_tokens, chooser.getrandbits(60)
        written = self.batches("writing prompts", texts, cap, self.prompt_stops, draw, seed)
        seen = SeenPrompts()
        for prompt in earlier:
            seen.refuse(prompt)
        kept = []
        for (kind, opening), end in zip(starts, written, strict=True):
            text, finished = self.cut(end, self.steerings[kind].closing)
            prompt = (opening + text).strip()
            reason = "prompt unfinished" if not finished else refuse_prompt(prompt) or seen.refuse(prompt)
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
        for (kind, prompt), end in zip(prompts, written, strict=True):
            text = self.target.tokenizer.decode(end.tokens, skip_special_tokens=False)
            reason = refuse_answer(text, end.tokens, self.options.keep_loops)
            if reason:
                dropped[reason] += 1
                continue
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            finish = "eos" if end.finished else "length"
            rows.append({"messages": messages, "meta": {"kind": kind, "finish": finish, "target": self.target.name}})
        return rows

    def batches(
        self, what: str, texts: list[str], cap: int, stops: frozenset[int], draw: Draw, seed: int
    ) -> list[Written]:
        """Continue all texts, those of similar length together; results in the order of the texts."""
        ids = [chat.tokenize(self.target.tokenizer, text) for text in texts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        size = self.options.batch_size
        done: dict[int, Written] = {}
        for number, start in enumerate(range(0, len(order), size)):
            self.progress.advance(0, note=f"{what} {start}/{len(order)}")
            rows = order[start : start + size]
            written = continue_batch(
                self.target,
                [ids[i] for i in rows],
                max_new_tokens=cap,
                stop_ids=stops,
                draw=draw,
                seed=seed + number,
            )
            done.update(zip(rows, written, strict=True))
        return [done[i] for i in range(len(texts))]

    def cut(self, end: Written, closing: str) -> tuple[str, bool]:
        """The user's text, and whether the turn was ended, by a token or by the closing's text."""
        text = self.target.tokenizer.decode(end.tokens, skip_special_tokens=False)
        marker = closing.strip()
        if not end.finished and marker and marker in text:
            return text[: text.index(marker)], True
        return text, end.finished


# ------------------------------------------------------------------------------------------------ steering


def steering(tokenizer: Any, system: str, template_kwargs: dict[str, Any] | None = None) -> Steering:
    """Find the opening and the closing of a user turn in any template, around a text found nowhere else."""
    user = {"role": "user", "content": chat.SENTINEL}
    messages = [{"role": "system", "content": system}, user] if system else [user]
    try:
        text = chat.render(tokenizer, messages, template_kwargs)
    except UserError:
        # Templates without a system turn refuse it: what it says then opens the user turn.
        joined = [{"role": "user", "content": f"{system}\n\n{chat.SENTINEL}"}]
        text = chat.render(tokenizer, joined, template_kwargs)
    opening, found, closing = text.partition(chat.SENTINEL)
    if not found:
        raise UserError("the chat template of the target does not show what the user says")
    return Steering(opening, closing)


def first_special(tokenizer: Any, closing: str) -> set[int]:
    """The control token that a closing begins with, if it does."""
    first = chat.leading_control(tokenizer, closing.lstrip())
    return set() if first is None else {first}


def share_out(weights: dict[str, float], have: Counter[str], wanted: int, chooser: random.Random) -> list[str]:
    """Kinds of the next `wanted` prompts: those that are behind their weight among the kept get more."""
    total = sum(have.values()) + wanted
    scale = total / sum(weights.values())
    missing = [max(0.0, weight * scale - have[kind]) for kind, weight in weights.items()]
    return chooser.choices(list(weights), missing, k=wanted)


def parse_kinds(text: str) -> dict[str, float]:
    """`coding=2,maths` -> weights; empty for all kinds as the table has them."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, weight = part.partition("=")
        if kind not in KINDS:
            raise UserError(f"--kinds {kind}: unknown kind; known are {', '.join(KINDS)}")
        try:
            weights[kind] = float(weight) if weight else KINDS[kind].weight
        except ValueError:
            weights[kind] = 0.0
        if not 0 < weights[kind] < float("inf"):
            raise UserError(f"--kinds {part}: the weight must be a number above 0")
    return weights or {kind: entry.weight for kind, entry in KINDS.items()}


# ------------------------------------------------------------------------------------------------ state


def check(options: SynthesizeOptions) -> None:
    """Refuse what cannot work before a model is loaded."""
    least = {"count": 1, "top_k": 1, "max_prompt_tokens": 8, "max_new_tokens": 1, "batch_size": 1}
    for name, low in least.items():
        if getattr(options, name) < low:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {low}")
    if options.temperature < 0 or options.prompt_temperature <= 0:
        raise UserError("--temperature must be at least 0 and --prompt-temperature above 0")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: must be above 0 and at most 1")
    if options.out.is_dir():
        raise UserError(f"--out {options.out}: is a folder, name a file")


def claim(partial: Path, options: SynthesizeOptions, dtype: str) -> None:
    """Begin OUT.partial/, or go on with it if it was begun with the same options."""
    mine = {k: v for k, v in dataclasses.asdict(options).items() if k not in FREE_OPTIONS} | {"dtype": dtype}
    file = partial / PARTIAL_OPTIONS
    if not file.exists():
        write_json(file, mine)
    theirs = read_json(file)
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise UserError(
                f"{partial} was begun with --{name.replace('_', '-')} {theirs.get(name)}, now it is {value}: "
                "go on with the old value, or delete that folder"
            )


def round_file(partial: Path, number: int) -> Path:
    return partial / f"round-{number:05d}.json"


def load_target(options: SynthesizeOptions, dtype: str) -> Target:
    target = Target.load(
        options.target,
        adapter=options.adapter,
        dtype=dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        pack=False,  # packing is for a handful of rows, here there are many
    )
    use_batch_attention(target)
    return target


def describe(options: SynthesizeOptions, dtype: str, target: Target, gathered: Gathered) -> dict[str, Any]:
    """What OUT.meta.json says: enough to make the file again and to judge it."""
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("out", "device", "dtype")}
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": dtype,
        "options": settings,
        "conversations": len(gathered.rows),
        "kinds": dict(sorted(Counter(row["meta"]["kind"] for row in gathered.rows).items())),
        "finish": dict(Counter(row["meta"]["finish"] for row in gathered.rows)),
        "dropped": dict(gathered.dropped.most_common()),
    }


def describe_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
