"""`spechead data synthesize`: generate training conversations with the target, both prompts and answers.

Prompted with the opening of a user turn, a chat model generates a user's message; prompted with that message, it
answers. A head must learn to draft the target's own answers, whose ids are stored as they were written. The work
proceeds in rounds: prompts, filter, answers, filter, and so on for further turns. Each round has its own seed and its
own file in OUT.partial/, so that an interrupted command resumes and produces the same rows.
"""

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from spechead.data.prompts import read_prompts
from spechead.data.synthesis.continuous import Continuation, ContinuousDecoder, Request
from spechead.data.synthesis.filters import SeenPrompts, refuse_answer, refuse_prompt
from spechead.data.synthesis.gathered import Gathered, Round, Row, describe_counts
from spechead.data.synthesis.journal import check_out
from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.data.synthesis.steering import Steering, closing_tokens, steering, system_text
from spechead.data.template_record import recorded_date
from spechead.errors import UserError
from spechead.files import SURROGATE, claim, clean, make_folder, read_json, remove, write_json, write_text
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.chat_template import ChatTemplate, Message
from spechead.target.model import Target
from spechead.target.options import TargetOptions

PARTIAL_OPTIONS = "options.json"
BATCHES_PER_ROUND = 4
FOLLOW_UP = "follow-up: "  # before the reasons that end a conversation early


@dataclass(kw_only=True)
class SynthesizeOptions(TargetOptions):
    """What to generate and how."""

    target: str = BUNDLED
    """Bundled target, local folder or hub id that writes prompts and answers."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto is bfloat16 where the device computes it natively."""
    out: Path = Path("synthetic.jsonl")
    """JSONL file to write (-o); OUT.meta.json records how it was made, OUT.partial/ contains unfinished work."""
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
    max_turns: Annotated[int, Range(1)] = 1
    """Questions of a conversation at most; it has fewer where the next one, or its answer, is not usable."""
    language: str = ""
    """Language of the conversations, in words that the target understands (German, Brazilian Portuguese); empty:
    English. Others are not checked for their language, and their first words are left to the target."""
    exclude: str = ""
    """JSONL file of prompts, such as those of an evaluation; they and near-duplicates are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_out(self.out)
        if SURROGATE.search(self.language):
            raise UserError("option language: is not valid UTF-8")


# These may change when an interrupted command is resumed.
FREE_OPTIONS = {"out", "count", "exclude", "device", "trust_remote_code"}


def synthesize(options: SynthesizeOptions) -> dict[str, Any]:
    """Write `options.out`; returns the content of OUT.meta.json."""
    weights = parse_kinds(options.kinds)
    excluded = [prompt.text for prompt in read_prompts(Path(options.exclude))] if options.exclude else []
    make_folder(options.out.resolve().parent)
    partial = options.out.with_name(options.out.name + ".partial")
    if (partial / PARTIAL_OPTIONS).exists():
        claim_partial(partial, options)
    options = replace(options, template_date=options.template_date or recorded_date(partial / PARTIAL_OPTIONS))
    gathered = Gathered(excluded, options.count)
    while not gathered.complete and round_file(partial, gathered.rounds).exists():
        gathered.add(read_json(round_file(partial, gathered.rounds)))
    target = options.load()
    with Progress("synthesize", options.count, "conversation", done=len(gathered.rows)) as progress:
        writer = Writer(options, target, weights, progress)
        claim_partial(
            partial, options, target.chat
        )  # not before: one that cannot be used must not bind the next attempt
        while not gathered.complete:
            round_, path = writer.round(gathered), round_file(partial, gathered.rounds)
            progress.advance(gathered.add(round_))
            gathered.refuse_useless(target)
            write_json(path, round_)
    meta = describe(options, target, gathered)
    write_text(options.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in gathered.rows))
    write_json(options.out.with_name(options.out.name + ".meta.json"), meta)
    remove(partial)
    dropped = describe_counts(gathered.dropped) or "nothing"
    print(f"{options.out}: {len(gathered.rows)} conversations; dropped: {dropped}")
    return meta


@dataclass
class Conversation:
    """A conversation while it is written."""

    kind: str
    messages: list[Message]
    answer_ids: list[list[int]] = field(default_factory=list)  # as written, with the end of the turn where it came
    finish: str = ""  # "eos" or "length": what ended the last answer

    def row(self, target: Target) -> Row:
        meta = {
            "kind": self.kind,
            "finish": self.finish,
            "target": target.name,
            "tokenizer": target.chat.tokenizer_digest,
        }
        return {"messages": self.messages, "answer_ids": self.answer_ids, "meta": meta}


class Writer:
    """Generates rounds: the users' messages of a turn, then the answers, then the next turn."""

    def __init__(
        self, options: SynthesizeOptions, target: Target, weights: dict[str, float], progress: Progress
    ) -> None:
        self.options, self.target, self.weights, self.progress = options, target, weights, progress
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        openings = [self.steering(kind) for kind in weights]
        if options.max_turns > 1:  # a template that refuses further turns does so before any work
            openings.append(self.steering(next(iter(weights)), probe))
        # The token that ends a user's turn is not always one that ends an answer.
        self.prompt_stops = target.eos_ids | {
            token for s in openings for token in closing_tokens(target.chat, s.closing)
        }

    def steering(self, kind: str, earlier: Sequence[Message] = ()) -> Steering:
        system = system_text(kind, self.options.language)
        return steering(self.target.chat, system, earlier)

    def round(self, gathered: Gathered) -> Round:
        """The next round after those gathered."""
        chooser = random.Random(f"{self.options.seed}/{gathered.rounds}")
        attempts = gathered.next_attempts(self.options.batch_size * BATCHES_PER_ROUND)
        kinds = choose_kinds(self.weights, gathered.kinds, attempts, chooser)
        dropped: Counter[str] = Counter()
        open_ = self.first_messages(kinds, chooser, gathered.prompts, dropped)
        usable = len(open_)
        done: list[Conversation] = []
        for turn in range(self.options.max_turns):
            if turn:
                open_ = self.further_messages(open_, chooser, dropped)
            open_ = self.answer(open_, chooser, dropped)
            done += [c for c in open_ if turn == 0]
            open_ = [c for c in open_ if c.finish == "eos"]  # a user does not go on from half an answer
        return {
            "rows": [c.row(self.target) for c in done],
            "dropped": dict(dropped),
            "attempts": attempts,
            "usable_prompts": usable,
        }

    def first_messages(
        self, kinds: list[str], chooser: random.Random, earlier: list[str], dropped: Counter[str]
    ) -> list[Conversation]:
        """Conversations of one message each, those that passed the filters."""
        english = not self.options.language
        starts = [(kind, chooser.choice(KINDS[kind].openings) if english else "") for kind in kinds]
        steerings = {kind: self.steering(kind) for kind in set(kinds)}
        texts = self.user_texts([(steerings[kind], opening) for kind, opening in starts], chooser)
        seen = SeenPrompts()
        for prompt in earlier:
            seen.add(prompt)
        kept = []
        for (kind, _), (text, finished) in zip(starts, texts, strict=True):
            reason = "prompt unfinished" if not finished else refuse_prompt(text, english) or seen.add(text)
            if reason:
                dropped[reason] += 1
            else:
                kept.append(Conversation(kind, [{"role": "user", "content": text}]))
        return kept

    def further_messages(
        self, conversations: list[Conversation], chooser: random.Random, dropped: Counter[str]
    ) -> list[Conversation]:
        """Add the user's next message; returns the conversations in which it passed the filters, the others end."""
        texts = self.user_texts([(self.steering(c.kind, c.messages), "") for c in conversations], chooser)
        kept = []
        for conversation, (text, finished) in zip(conversations, texts, strict=True):
            seen = SeenPrompts()
            for message in conversation.messages:
                seen.add(message["content"])
            reason = "prompt unfinished"
            if finished:
                reason = refuse_prompt(text, english=not self.options.language) or seen.add(text)
            if reason:
                dropped[f"{FOLLOW_UP}{reason}"] += 1
            else:
                conversation.messages.append({"role": "user", "content": text})
                kept.append(conversation)
        return kept

    def user_texts(self, starts: list[tuple[Steering, str]], chooser: random.Random) -> list[tuple[str, bool]]:
        """A user's message after each opening, which may contain its first words, and whether it was ended."""
        options = self.options
        prompts = [self.target.chat.tokenize(start.opening + words) for start, words in starts]
        cap, temperature = options.max_prompt_tokens, options.prompt_temperature
        written = self.write("writing prompts", prompts, cap, temperature, self.prompt_stops, chooser)
        texts = []
        for (start, words), continuation in zip(starts, written, strict=True):
            text, finished = self.cut(continuation, start.closing)
            texts.append(((words + text).strip(), finished))
        return texts

    def answer(
        self, conversations: list[Conversation], chooser: random.Random, dropped: Counter[str]
    ) -> list[Conversation]:
        """Answer the last message; returns the conversations whose answer passed the filters. The others lose that
        message again, and are dropped where it was their first."""
        options = self.options
        prompts = [self.target.chat.prompt_ids(c.messages) for c in conversations]
        cap, temperature = options.max_new_tokens, options.temperature
        written = self.write("answering", prompts, cap, temperature, self.target.eos_ids, chooser)
        kept = []
        for conversation, continuation in zip(conversations, written, strict=True):
            text = self.text(continuation)
            reason = refuse_answer(text, continuation.tokens, options.keep_loops)
            if reason:
                dropped[f"{FOLLOW_UP}{reason}" if conversation.answer_ids else reason] += 1
                conversation.messages.pop()
                continue
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.answer_ids.append(continuation.tokens + [t for t in [continuation.end] if t is not None])
            conversation.finish = "eos" if continuation.finished else "length"
            kept.append(conversation)
        return kept

    def write(
        self,
        what: str,
        prompts: list[list[int]],
        cap: int,
        temperature: float,
        stops: frozenset[int],
        chooser: random.Random,
    ) -> list[Continuation]:
        """Continue all prompts, in their order."""
        requests = [Request(i, ids, cap, temperature, chooser.getrandbits(60)) for i, ids in enumerate(prompts)]
        written: dict[Hashable, Continuation] = {}

        def done(request: Request, continuation: Continuation) -> tuple[()]:
            written[request.key] = continuation
            self.progress.advance(0, note=f"{what} {len(written)}/{len(prompts)}")
            return ()

        options = self.options
        decoder = ContinuousDecoder(
            self.target, batch_size=options.batch_size, stop_ids=stops, top_k=options.top_k, top_p=options.top_p
        )
        decoder.run(iter(requests), done)
        return [written[i] for i in range(len(prompts))]

    def cut(self, written: Continuation, closing: str) -> tuple[str, bool]:
        """The user's text, and whether the turn was ended, by a token or by the text of the closing."""
        text = self.text(written)
        marker = closing.strip()
        if not written.finished and marker and marker in text:
            return text[: text.index(marker)], True
        return text, written.finished

    def text(self, written: Continuation) -> str:
        return clean(self.target.tokenizer.decode(written.tokens, skip_special_tokens=False))


# ------------------------------------------------------------------------------------------------ kinds


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


def claim_partial(partial: Path, options: SynthesizeOptions, chat: ChatTemplate | None = None) -> None:
    """Bind the folder of unfinished work to these options, or raise UserError if it was begun with others.

    `chat`: the target's; before it is loaded, the recorded template is taken for the same.
    """
    path = partial / PARTIAL_OPTIONS
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in FREE_OPTIONS}
    record = chat.record() if chat else {name: read_json(path).get(name) for name in ("chat_template", "template_date")}
    remedy = "keep the old value, or delete that folder"
    claim(path, settings | {"dtype": options.precision} | record, remedy=remedy)


def round_file(partial: Path, number: int) -> Path:
    return partial / f"round-{number:05d}.json"


def describe(options: SynthesizeOptions, target: Target, gathered: Gathered) -> dict[str, Any]:
    """The content of OUT.meta.json: enough to reproduce the file and to assess it."""
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("out", "device", "dtype")}
    settings["exclude"] = clean(options.exclude)  # the name of a file may be any bytes
    settings |= target.chat.record()
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": options.precision,
        "options": settings,
        "conversations": len(gathered.rows),
        "kinds": dict(sorted(Counter(row["meta"]["kind"] for row in gathered.rows).items())),
        "turns": dict(sorted(Counter(str(len(row["answer_ids"])) for row in gathered.rows).items())),
        "finish": dict(Counter(row["meta"]["finish"] for row in gathered.rows)),
        "dropped": dict(gathered.dropped.most_common()),
    }
