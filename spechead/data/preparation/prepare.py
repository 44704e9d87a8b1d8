"""`spechead data prepare`: conversations to a prepared data set, which training reads from disk.

Training does the same by itself and keeps the result in a cache, so that a second start, and the other processes of
the machine, find it there.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from os.path import exists
from pathlib import Path
from typing import Annotated, Any, Literal

from spechead.data.preparation.prepared import Prepared, Writer, is_prepared, open_prepared, read_index, writing
from spechead.data.preparation.row_encoder import SMALL_ROWS, Outcome, outcomes
from spechead.data.preparation.settings import Identity, Preparation, identify, prepared_cache, stamps_of
from spechead.data.template_record import date_of_data, template_warnings
from spechead.errors import UserError
from spechead.files import exclusively, remove
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.chat_template import ChatTemplate
from spechead.target.loading import load_limits
from spechead.target.options import TemplateOptions

SHOWN = 3  # places of each reason
MOST_REASONS = 200  # reasons may quote the data
OTHER_REASONS = "other reasons"


@dataclass(kw_only=True)
class SampleOptions(TemplateOptions):
    """How conversations become samples."""

    target: str = field(default=BUNDLED)
    """Bundled target, local folder or hub id whose chat template and tokenizer are used."""
    max_length: Annotated[int, Range(1)] = 512
    """Conversations are cut after this many tokens."""
    history: Literal["each", "last"] = "each"
    """Where the chat template rewrites earlier turns: each, every turn as it is served, in samples of their own; last,
    only the last one."""
    limit: Annotated[int, Range(0)] = 0
    """Conversations to read; 0 for all."""
    streaming: bool = False
    """Read hub datasets as they arrive, without a copy on the disk."""
    workers: Annotated[int, Range(0)] = 0
    """Processes that tokenise; 0: one for each core where the data are large."""

    def preparation(self, sources: list[str], **more: Any) -> Preparation:
        """These options with `sources` as a `Preparation`."""
        rows, positions = load_limits(self.target, trust_remote_code=self.trust_remote_code)
        day = self.template_date or date_of_data(sources)
        return Preparation(
            sources,
            replace(self, template_date=day).load_chat(),
            self.max_length,
            history=self.history,
            limit=self.limit,
            vocab_size=rows,
            positions=positions,
            streaming=self.streaming,
            workers=self.workers,
            **more,
        )


@dataclass(kw_only=True)
class PrepareOptions(SampleOptions):
    """Tokenise conversations once, for training to read from disk: give the folder as --data.train."""

    sources: list[str] = field(kw_only=False)
    """JSONL, JSON or Parquet files, folders of them, or hub datasets as hf:NAME[:SPLIT]."""
    out: str = ""
    """Folder to write."""
    weights: Annotated[list[float], Range(above=0)] = field(default_factory=list)
    """How often an epoch sees each conversation of each source, such as [1, 0.5]: all of the first and a random half of
    the second. Empty: once."""
    seed: int = 0
    """Seed of the draw that weights with a fraction ask for."""
    strict: bool = False
    """Refuse the first conversation that cannot be used, instead of dropping and counting them."""


def prepare_data(options: PrepareOptions) -> Prepared:
    """Write the prepared data set, and print what was dropped and what was noticed."""
    if not options.out:
        raise UserError("option out: is empty, name the folder to write with -o")
    preparation = options.preparation(
        options.sources, weights=options.weights, seed=options.seed, strict=options.strict
    )
    data = prepare(preparation, Path(options.out))
    warnings = template_warnings(preparation.chat.record(), options.sources)
    for line in [*warnings, *cut_at_positions(preparation), *remarks(data)]:
        print(line)
    counts = data.counts
    print(
        f"{options.out}: {counts['samples']} samples of {counts['usable']} conversations, {counts['tokens']} tokens, "
        f"{counts['supervised tokens']} of them to learn"
    )
    return data


def cut_at_positions(preparation: Preparation) -> list[str]:
    """A line where the target takes shorter samples than asked for."""
    positions, asked = preparation.positions, preparation.max_length
    if positions >= asked:
        return []
    return [f"samples are cut at the target's {positions} positions, below {preparation.prefix}max_length {asked}"]


def remarks(data: Prepared) -> list[str]:
    """What was dropped, and what else is worth knowing, a line each."""
    rows, lines = data.counts["rows"], []
    for why, count in data.dropped.items():
        places = ", ".join(data.dropped_at(why)) + (", ..." if count > SHOWN else "")
        lines.append(f"{count} of {rows} conversations dropped, {why}: {places}")
    lines += [f"{count} {what}" for what, count in data.index["notes"].items()]
    if replaced := data.counts["replaced"]:
        lines.append(f"{replaced} halves of surrogate pairs, which are no text, replaced by U+FFFD")
    return lines


def open_for(folder: str, preparation: Preparation) -> Prepared:
    """The prepared data set in `folder`, which is the only source of `preparation`, if it fits the rest of that.

    Raises UserError that names what differs.
    """
    data = open_prepared(Path(folder))
    here, there, prefix = template_of(preparation.chat), data.index["template"], preparation.prefix
    if here["digest"] != there.get("digest"):
        names = ("template_kwargs", "chat_template", "template_date", "tokenizer")
        name = next((name for name in names if here[name] != there.get(name)), "")
        what = "another tokenizer" if name == "tokenizer" else "another chat template"
        if name in ("template_kwargs", "template_date"):
            what = f"{name} {there.get(name)!r}, here it is {here[name]!r}"
        raise UserError(f"{folder}: was prepared with {what}; prepare it again for this target")
    if preparation.vocab_size and data.counts["max id"] >= preparation.vocab_size:
        raise UserError(
            f"{folder}: contains the id {data.counts['max id']}, the target's embedding has {preparation.vocab_size} "
            "rows; prepare it again for this target"
        )
    if data.counts["longest"] > preparation.length:
        raise UserError(
            f"option {prefix}max_length: {preparation.length} is below the longest sample of {folder}, "
            f"{data.counts['longest']} tokens; raise it, or prepare it again"
        )
    for name in ("weights", "limit"):
        if getattr(preparation, name):
            raise UserError(f"option {prefix}{name}: applies to conversations, {folder} is prepared; leave it out")
    if preparation.history == "last" and data.index["settings"].get("history") != "last":
        raise UserError(f"option {prefix}history: applies to conversations, {folder} is prepared; prepare it again")
    if preparation.strict and data.dropped:
        raise strict_error(preparation, *data.first_dropped())
    return data


# ------------------------------------------------------------------------------------------------ the data set


def prepare(preparation: Preparation, folder: Path | None = None, *, quiet: bool = False) -> Prepared:
    """The prepared data set, written to `folder`, by default in the cache, unless it is there already. The only source
    may itself be one.

    Of several processes that ask for the same one, the first writes it, and the others wait; `quiet`: without saying
    so. Raises UserError where nothing can be used, and with `strict` for the first row that cannot.
    """
    if prepared := [name for name in preparation.sources if is_prepared(name)]:
        if len(preparation.sources) > 1 or folder:
            raise UserError(f"{prepared[0]}: is prepared, and cannot be combined with other sources or prepared again")
        return open_for(prepared[0], preparation)
    identity = identify(preparation)
    path = folder or prepared_cache() / identity.key
    data = find(path, identity.key, preparation.sources)
    if data is None:
        if folder:
            refuse_foreign(folder, preparation.sources)
        note = "" if quiet else f"another process prepares {path}"
        with exclusively(path.with_name(f".{path.name}.lock"), note):
            data = find(path, identity.key, preparation.sources)
            if data is None:
                for leftover in path.parent.glob(f".{path.name}.*.*"):  # of a process that was killed
                    remove(leftover)
                write(preparation, identity, path)
                data = open_prepared(path, preparation.sources)
    if preparation.strict and data.dropped:
        raise strict_error(preparation, *data.first_dropped())
    return data


def find(folder: Path, key: str, sources: list[str]) -> Prepared | None:
    """The data set in `folder` if it has this key and can be read."""
    try:
        return open_prepared(folder, sources) if read_index(folder)["key"] == key else None
    except UserError:
        return None


def refuse_foreign(folder: Path, sources: list[str]) -> None:
    """Raise UserError where `folder` is not empty and no prepared data set, which it would replace, or in a source."""
    for name in sources:
        if folder.resolve().is_relative_to(Path(name).resolve()):
            raise UserError(f"option out: {folder} is inside the source {name}, give a folder elsewhere")
    if exists(folder) and not is_prepared(str(folder)) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"option out: {folder} exists and is no prepared data set, give another folder")


def write(preparation: Preparation, identity: Identity, folder: Path) -> None:
    """Encode all rows into `folder`."""
    tally = Tally(preparation)
    quiet = 0 < identity.rows <= SMALL_ROWS
    progress = Progress("prepare", identity.rows, "row", quiet=quiet)
    with writing(folder) as writer, progress, closing(outcomes(preparation)) as results:
        for outcome in results:
            tally.add(outcome, writer)
            progress.advance()
        for before, after in zip_longest(identity.stamps, stamps_of(preparation.sources)):
            if before != after:  # the key would be that of other data
                raise UserError(f"{(before or after)[0]}: has changed while it was read; start again")
        tally.refuse_empty()
        what = {"key": identity.key, "sources": preparation.sources, "settings": preparation.settings()}
        writer.finish(what | {"template": template_of(preparation.chat)} | tally.index())


def template_of(chat: ChatTemplate) -> dict[str, Any]:
    """What the index records of a chat template and its tokenizer."""
    return chat.record() | {"tokenizer": chat.tokenizer_digest, "digest": chat.digest}


@dataclass
class Tally:
    """Counts outcomes and hands their samples to the writer."""

    preparation: Preparation
    rows: int = 0
    usable: int = 0
    truncated: int = 0
    replaced: int = 0
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)  # reason -> count, first places, first detail
    notes: Counter[str] = field(default_factory=Counter)
    written_by: Counter[str] = field(default_factory=Counter)
    places: dict[tuple[int, str], int] = field(default_factory=dict)  # name -> index
    kinds: dict[str, int] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome, writer: Writer) -> None:
        self.rows += 1
        self.replaced += outcome.replaced
        self.notes.update(outcome.notes)
        if outcome.parsed:
            self.written_by[outcome.writer] += 1
        place, number = self._place(outcome)
        if outcome.reason:
            self._drop(outcome, place, number)
            return
        kind = self.kinds.setdefault(outcome.kind, len(self.kinds))
        author = self.writers.setdefault(outcome.writer, len(self.writers))
        for ids, supervised in outcome.samples:
            writer.add(ids, supervised, outcome.repeats, outcome.number, place, number, kind, author)
        self.usable += 1
        self.truncated += outcome.truncated

    def _place(self, outcome: Outcome) -> tuple[int, int]:
        """The index of a place's name, and the number of the line or row in it."""
        name, _, number = outcome.where.rpartition(" ")
        source = self.preparation.sources[outcome.source]
        prefix = source if name.startswith(source) else str(Path(source))
        key = (outcome.source, name.removeprefix(prefix)) if name.startswith(prefix) else (-1, name)
        return self.places.setdefault(key, len(self.places)), int(number)

    def _drop(self, outcome: Outcome, place: int, number: int) -> None:
        why = f"{outcome.reason}: {outcome.detail}" if outcome.detail else outcome.reason
        if self.preparation.strict:
            raise strict_error(self.preparation, outcome.where, why)
        known = outcome.reason in self.dropped or len(self.dropped) < MOST_REASONS
        reason = outcome.reason if known else OTHER_REASONS
        entry = self.dropped.setdefault(reason, {"count": 0, "places": [], "detail": why})
        entry["count"] += 1
        if len(entry["places"]) < SHOWN:
            entry["places"].append([outcome.number, place, number])

    def refuse_empty(self) -> None:
        """Raise UserError where no sample is left."""
        if self.usable:
            return
        if not self.rows:
            raise UserError(f"option {self.preparation.prefix}weights: no row is drawn, raise them")
        reasons = self._sorted()
        why = ", ".join(f"{entry['count']} {name}" for name, entry in reasons.items())
        name, entry = next(iter(reasons.items()))
        remedy = entry["detail"].removeprefix(name).removeprefix(": ")
        if name == "no assistant turn":
            remedy = "`spechead data regenerate` lets the target answer them"
        if "too long" in reasons:
            remedy = f"raise {self.preparation.prefix}max_length, which is {self.preparation.length}"
            if self.preparation.length == self.preparation.positions:
                remedy = f"the target has {self.preparation.positions} positions"
        detail = f"; {remedy}" if remedy else ""
        raise UserError(f"none of {self.rows} conversations can be used: {why}{detail}")

    def _sorted(self) -> dict[str, dict[str, Any]]:
        return dict(sorted(self.dropped.items(), key=lambda entry: -entry[1]["count"]))

    def index(self) -> dict[str, Any]:
        counts = {"rows": self.rows, "usable": self.usable, "truncated": self.truncated, "replaced": self.replaced}
        return {
            "counts": counts,
            "dropped": self._sorted(),
            "notes": {name: count for name, count in self.notes.items() if count},
            "written by": dict(self.written_by),
            "places": [list(place) for place in self.places],
            "kinds": list(self.kinds),
            "writers": list(self.writers),
        }


def strict_error(preparation: Preparation, where: str, why: str) -> UserError:
    return UserError(f"{where}: {why} (option {preparation.prefix}strict)")
