"""`spechead data regenerate`: the target answers the user turns of any data set, turn by turn.

A head learns to draft what its target writes, so that it is trained on the target's own answers. They are decoded
here, by as many processes as torchrun starts, or asked from a server. Each finished conversation is kept at once in
OUT.partial/; when all are finished, OUT has them in the order of the source.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from spechead.data.conversation import Conversation
from spechead.data.messages import Unusable
from spechead.data.sources import Row, parse, read_rows
from spechead.data.synthesis.continuous import Continuation, ContinuousDecoder, Request
from spechead.data.synthesis.dialogue import Answer, Dialogue, split_turns
from spechead.data.synthesis.gathered import describe_counts
from spechead.data.synthesis.journal import SETTINGS, Entries, Entry, Journal, Place, check_out
from spechead.data.synthesis.server import ChatServer, warning_of
from spechead.data.template_record import recorded_date
from spechead.errors import UserError, first_line
from spechead.files import refuse_unwritable, remove, replacing, write_json
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.chat_template import ChatTemplate, TemplateError
from spechead.target.model import Target
from spechead.target.options import TargetOptions

MOST_REASONS = 3  # that a message names
NAMED_REASONS = 20  # of dropped conversations in OUT.meta.json; the others are counted together


@dataclass
class RegenerateOptions(TargetOptions):
    """Which prompts to answer, and how."""

    prompts: str
    """JSONL or JSON file, Parquet file, folder of these, or hub dataset as hf:NAME[:SPLIT], in any usual layout."""
    out: Path = field(default=Path("regenerated.jsonl"), kw_only=True)
    """JSONL file to write (-o); OUT.meta.json records how it was made, OUT.partial/ contains unfinished work."""
    target: str = field(default="", kw_only=True)
    """Bundled target, local folder or hub id. With --server: whose tokenizer checks the server's prompts."""
    dtype: str = field(default="auto", kw_only=True)
    """float32, bfloat16, float16; auto is bfloat16 where the device computes it natively."""
    server: str = field(default="", kw_only=True)
    """Address of a server with OpenAI's protocol, up to /v1, that answers instead; key: OPENAI_API_KEY."""
    model: str = field(default="", kw_only=True)
    """Name of the target at the server; may be left out where it serves one model, or the target under its name."""
    concurrency: Annotated[int, Range(1)] = field(default=16, kw_only=True)
    """Requests that the server has at a time."""
    timeout: Annotated[float, Range(above=0)] = field(default=600.0, kw_only=True)
    """Seconds that the server may take for one answer."""
    retries: Annotated[int, Range(0)] = field(default=5, kw_only=True)
    """Further attempts for an answer, after growing pauses, before its conversation is counted as failed."""
    allow_failures: bool = field(default=False, kw_only=True)
    """Write OUT without the conversations that failed at the server."""
    temperature: Annotated[list[float], Range(0)] = field(default_factory=lambda: [0.0], kw_only=True)
    """0 is greedy. May be given several times: each conversation draws one of them."""
    top_k: Annotated[int, Range(1)] = field(default=100, kw_only=True)
    """Most likely tokens that sampling chooses among."""
    top_p: Annotated[float, Range(above=0, most=1)] = field(default=1.0, kw_only=True)
    """Probability mass, inside the top-k, that sampling chooses among."""
    seed: int = field(default=0, kw_only=True)
    """Fixes temperatures and samples of each conversation, however the work is divided."""
    max_new_tokens: Annotated[int, Range(1)] = field(default=1024, kw_only=True)
    """Longest answer, in tokens; one that reaches it is kept, is the last of its conversation, and is marked
    "finish": "length"."""
    max_turns: Annotated[int, Range(0)] = field(default=0, kw_only=True)
    """Turns of a conversation that are answered; 0 for all."""
    limit: Annotated[int, Range(0)] = field(default=0, kw_only=True)
    """Rows to read; 0 for all."""
    batch_size: Annotated[int, Range(1)] = field(default=64, kw_only=True)
    """Conversations decoded at once by a process: more is faster until memory runs out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_out(self.out)
        if not self.prompts:
            raise UserError("option prompts: is empty, name a file, a folder or hf:NAME[:SPLIT]")
        source, out = Path(self.prompts).absolute(), self.out.absolute()
        if source == out or source in out.parents:
            raise UserError(f"option out: {self.out} is read as a source, name a file elsewhere")
        if not self.temperature:
            raise UserError("option temperature: is empty, give it once or several times")
        if self.model and not self.server:
            raise UserError("option model: belongs to --server; use --target for the target that is loaded here")
        if self.server and not self.target and (self.chat_template or self.adapter):
            name = "chat_template" if self.chat_template else "adapter"
            raise UserError(f"option {name}: the server has its own; give --target, too, to compare its prompts")
        if self.server and process()[1] > 1:
            raise UserError("option server: one process is enough; start without torchrun and raise concurrency")


# These may change when an interrupted command is resumed, or are in the settings by what they resolve to.
FREE_OPTIONS = {
    "out", "target", "dtype", "device", "trust_remote_code", "batch_size",
    "server", "model", "concurrency", "timeout", "retries", "allow_failures",
}  # fmt: skip


def regenerate(options: RegenerateOptions) -> dict[str, Any]:
    """Write `options.out`; returns the content of OUT.meta.json, or {} where other processes are still at work."""
    refuse_unwritable(options.out.resolve().parent)
    source = survey(options)
    rank, world = process()
    journal = Journal(options.out, rank)
    if not options.server or options.target:  # else the server's template prints its own date
        day = options.template_date or recorded_date(journal.partial / SETTINGS, journal.meta)
        options = dataclasses.replace(options, template_date=day)
    writer: ServerWriter | TargetWriter = ServerWriter(options) if options.server else TargetWriter(options)
    template = writer.chat.record() if writer.chat else {}
    settings = writer.settings | {"options": recorded(options) | template, "digest": source.digest}
    finished = journal.begin(settings)
    if finished is None:
        print(f"{options.out} is there already, written with these settings; delete it to write it again")
        return journal.written()
    work = Work(options, source, journal, writer)
    work.answer(rank, world, finished)
    if work.failed and not options.allow_failures:
        raise UserError(f"{work.failures()}; the others are kept: the same command asks for these again")
    return finish(options, source, journal, settings, work)


# ------------------------------------------------------------------------------------------------ the source


@dataclass
class Source:
    """What a first reading of the prompts has found."""

    numbers: list[int]  # of the usable rows
    unusable: Counter[str]  # rows, by reason
    digest: str  # of all rows


def survey(options: RegenerateOptions) -> Source:
    """Read all rows once. Raises UserError where none can be used."""
    sha, unusable, usable = hashlib.sha256(), Counter[str](), list[int]()
    for number, row in enumerate(read_rows(options.prompts, limit=options.limit)):
        sha.update(row.value if isinstance(row.value, bytes) else json.dumps(row.value, default=kind_of).encode())
        sha.update(b"\n")
        try:
            split_turns(parse(row, answered=False))
            usable.append(number)
        except Unusable as error:
            unusable[error.reason] += 1
    if not usable:
        why = describe_counts(unusable, MOST_REASONS) or "it has no rows"
        raise UserError(f"option prompts: {options.prompts} has no row with a user's turn ({why})")
    return Source(usable, unusable, sha.hexdigest())


def kind_of(value: Any) -> str:
    """What stands for a value that JSON cannot express in the digest: it is in a column that is not read."""
    return type(value).__name__


def conversations(options: RegenerateOptions) -> Iterator[tuple[int, Row, Conversation]]:
    """The usable rows with their numbers."""
    for number, row in enumerate(read_rows(options.prompts, limit=options.limit)):
        try:
            conversation = parse(row, answered=False)
            split_turns(conversation)
        except Unusable:
            continue
        yield number, row, conversation


# ------------------------------------------------------------------------------------------------ the writers

Record = Callable[[Dialogue], None]
Fail = Callable[[Dialogue, str], None]


class TargetWriter:
    """Answers with the target, loaded into this process."""

    def __init__(self, options: RegenerateOptions) -> None:
        options = dataclasses.replace(options, target=options.target or BUNDLED)
        self.options = options
        self.target: Target = options.load()
        self.chat: ChatTemplate | None = self.target.chat
        if not self.chat.source:  # else each chat would be refused, after all have been read
            raise UserError(f"target {self.target.name!r} has no chat template; give one as option chat_template")
        self.name = self.target.name
        self.settings = {
            "target": self.target.name,
            "fingerprint": self.target.fingerprint,
            "dtype": options.precision,
        }

    def answer(self, dialogues: Iterator[Dialogue], record: Record, fail: Fail, wrote: Callable[[int], None]) -> None:
        """Answer all turns of all dialogues; each goes to `record`, the size of each answer to `wrote`."""
        chat = self.target.chat

        def request(dialogue: Dialogue) -> Request | None:
            """The next turn; None, where there is none: the dialogue is recorded."""
            if dialogue.open():
                try:
                    text = chat.prompt_text(dialogue.messages, dialogue.tools, dialogue.keywords)
                    if chat.ignores_tools(dialogue.messages, dialogue.tools, dialogue.keywords, text):
                        raise TemplateError("the chat template ignores tools")
                    prompt = chat.tokenize(text)
                except TemplateError as error:
                    dialogue.stop(f"refused by the chat template: {first_line(error.__cause__ or error)[:200]}")
                else:
                    cap, temperature = self.options.max_new_tokens, dialogue.temperature
                    return Request(dialogue, prompt, cap, temperature, dialogue.turn_seed)
            record(dialogue)
            return None

        def done(request_: Request, written: Continuation) -> list[Request]:
            dialogue = request_.key
            assert isinstance(dialogue, Dialogue)
            if not written.tokens and not written.finished:
                dialogue.stop("no room for an answer within the target's positions")
            else:
                text = self.target.tokenizer.decode(written.tokens, skip_special_tokens=False)
                ids = written.tokens if written.end is None else [*written.tokens, written.end]
                dialogue.add(Answer(text, ids, written.finished))
                wrote(len(ids))
            following = request(dialogue)
            return [] if following is None else [following]

        decoder = ContinuousDecoder(
            self.target,
            batch_size=self.options.batch_size,
            stop_ids=self.target.eos_ids,
            top_k=self.options.top_k,
            top_p=self.options.top_p,
        )
        decoder.run((one for one in map(request, dialogues) if one is not None), done)


class ServerWriter:
    """Asks a server for the answers. With a target, its tokenizer checks that the server renders the same prompts."""

    def __init__(self, options: RegenerateOptions) -> None:
        self.chat: ChatTemplate | None = None
        if options.target:
            self.chat = options.load_chat()
        request: dict[str, Any] = {"max_tokens": options.max_new_tokens, "top_p": options.top_p}
        if any(options.temperature):
            request["top_k"] = options.top_k
        self.server = ChatServer(
            url=options.server,
            model=options.model,
            settings=request,
            template_kwargs=options.template_kwargs,
            concurrency=options.concurrency,
            timeout_s=options.timeout,
            retries=options.retries,
            prompt_ids=self.chat.prompt_ids if self.chat else None,
        )
        self.server.choose_model(options.target)
        target = f"{options.target} with {options.adapter}" if options.adapter else options.target
        self.name = target or self.server.model
        self.settings = {"target": self.name, "served": self.server.model}

    def answer(self, dialogues: Iterator[Dialogue], record: Record, fail: Fail, wrote: Callable[[int], None]) -> None:
        """Answer all turns of all dialogues; each is handed to `record`, or, with the reason, to `fail`."""
        asyncio.run(self.server.answer(dialogues, record, fail, wrote))


# ------------------------------------------------------------------------------------------------ the work


class Work:
    """The conversations that this process answers, and what became of them."""

    def __init__(
        self,
        options: RegenerateOptions,
        source: Source,
        journal: Journal,
        writer: ServerWriter | TargetWriter,
    ) -> None:
        self.options, self.source, self.journal, self.writer = options, source, journal, writer
        self.failed: Counter[str] = Counter()  # conversations, by reason
        self.tokenizer = writer.chat.tokenizer_digest if writer.chat else ""

    def answer(self, rank: int, world: int, finished: dict[int, Place]) -> None:
        """Answer the unfinished conversations of this process, and append each to its journal.

        Which process has which follows from the numbers of the rows alone: processes that started earlier have already
        finished some, so that a share of the unfinished ones would not be the same seen from each.
        """
        if all(number in finished for number in self.source.numbers if number % world == rank):
            return  # without touching OUT.partial/, which another process may be about to remove
        with self.journal.appending() as journal:
            total = sum(number % world == rank for number in self.source.numbers)
            done = sum(number % world == rank for number in finished)
            title = "regenerate" if world == 1 else f"regenerate, process 1 of {world}"
            with Progress(title, total, "conversation", done=done, quiet=rank > 0) as progress:

                def record(dialogue: Dialogue) -> None:
                    journal.add(self.entry(dialogue))
                    progress.advance()

                def fail(dialogue: Dialogue, reason: str) -> None:
                    self.failed[reason] += 1

                self.writer.answer(self.dialogues(rank, world, finished), record, fail, Rate(progress))

    def entry(self, dialogue: Dialogue) -> Entry:
        """A finished conversation for the journal."""
        entry: Entry = {"number": dialogue.number, "counts": dialogue.count()}
        if dialogue.dropped:
            return entry | {"dropped": dialogue.dropped}
        return entry | {"ended": dialogue.ended, "row": dialogue.row(self.writer.name, self.tokenizer)}

    def dialogues(self, rank: int, world: int, finished: dict[int, Place]) -> Iterator[Dialogue]:
        """The unfinished conversations of this process, in their order."""
        options = self.options
        for number, row, conversation in conversations(options):
            if number % world == rank and number not in finished:
                yield Dialogue(
                    number,
                    row.where,
                    conversation,
                    temperatures=options.temperature,
                    seed=options.seed,
                    max_turns=options.max_turns,
                )

    def failures(self) -> str:
        return (
            f"{self.failed.total()} of {len(self.source.numbers)} conversations failed at {self.options.server}: "
            f"{describe_counts(self.failed, MOST_REASONS)}"
        )


class Rate:
    """Shows the tokens a second of this start."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.tokens, self.started = progress, 0, time.monotonic()

    def __call__(self, tokens: int) -> None:
        self.tokens += tokens
        rate = self.tokens / max(1e-9, time.monotonic() - self.started)
        self.progress.advance(0, note=f"{rate:.0f} tokens/s" if self.tokens else "")  # a server may not report them


# ------------------------------------------------------------------------------------------------ the result


def finish(
    options: RegenerateOptions, source: Source, journal: Journal, settings: dict[str, Any], work: Work
) -> dict[str, Any]:
    """Write OUT and its record, if all conversations are finished or failed; returns the record, else {}."""
    with journal.lock():
        if journal.gone:  # another process was the last
            remove(journal.partial)
            return {}
        finished = journal.finished()
        left = len(source.numbers) - len(finished) - work.failed.total()
        if left:
            print(f"{left} conversations are left to other processes; the last to finish writes {options.out}")
            return {}
        meta = settings | write_rows(options, journal, finished) | {"failed": dict(work.failed.most_common())}
        meta["unusable"] = dict(source.unusable.most_common())
        write_json(journal.meta, json.loads(json.dumps(meta)))
        remove(journal.partial)
    report(options, meta)
    return meta


def write_rows(options: RegenerateOptions, journal: Journal, finished: dict[int, Place]) -> dict[str, Any]:
    """Write OUT in the order of the source; returns the counts over all entries."""
    counts, dropped, ended, finish = (Counter[str]() for _ in range(4))
    rows = 0
    with Entries() as entries, replacing(options.out) as scratch:
        with scratch.open("w", encoding="utf-8", newline="\n") as file:
            for number in sorted(finished):
                entry = entries.read(finished[number])
                counts.update(entry["counts"])
                if "row" not in entry:
                    dropped[entry["dropped"]] += 1
                    continue
                rows += 1
                ended.update([entry["ended"]] if entry["ended"] else [])
                finish[entry["row"]["meta"]["finish"]] += 1
                file.write(json.dumps(entry["row"], ensure_ascii=False) + "\n")
        if not rows:
            remove(journal.partial)
            raise UserError(
                f"option prompts: no conversation was answered ({describe_counts(dropped, MOST_REASONS)}); look at the "
                "rows with `spechead data inspect`"
            )
    sums = {name: counts.pop(name, 0) for name in ("turns", "tokens", "truncated", "refused")}
    named = dict(dropped.most_common(NAMED_REASONS))
    if others := dropped.total() - sum(named.values()):
        named["other reasons"] = others
    return {
        "conversations": rows,
        **sums,
        "finish": dict(finish),
        "ended early": dict(ended.most_common()),
        "dropped": named,
        "server": dict(counts),
    }


def report(options: RegenerateOptions, meta: dict[str, Any]) -> None:
    """One line on what was written, and a warning where the server's prompts are not ours."""
    parts = [f"{meta['conversations']} conversations", f"{meta['turns']} turns", f"{meta['tokens']} tokens"]
    parts += [f"{meta[name]} {name}" for name in ("truncated", "refused") if meta[name]]
    for name in ("dropped", "failed", "unusable"):
        if meta[name]:
            parts.append(f"{sum(meta[name].values())} {name} ({describe_counts(Counter(meta[name]), MOST_REASONS)})")
    print(f"{options.out}: {', '.join(parts)}")
    if warning := warning_of(Counter(meta["server"]), meta["target"]):
        print(f"warning: {warning}")


def recorded(options: RegenerateOptions) -> dict[str, Any]:
    """The options that make the text."""
    values = dataclasses.asdict(options)
    return {name: value for name, value in values.items() if name not in FREE_OPTIONS}


def process() -> tuple[int, int]:
    """The number of this process and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
