"""`spechead data inspect`: print samples of a source with the supervised tokens marked, and counts.

Look at this before training: a wrong supervision mask raises no error.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spechead.data.dataset import Sample
from spechead.data.preparation.prepare import SampleOptions, cut_at_positions, prepare
from spechead.data.preparation.prepared import Prepared, PreparedSamples, is_prepared
from spechead.data.template_record import template_warnings
from spechead.options import Range

SUPERVISED_STYLE = "black on color(114)"


@dataclass(kw_only=True)
class InspectOptions(SampleOptions):
    """Which conversations to inspect, and how many to print."""

    file: str = field(kw_only=False)
    """JSONL, JSON or Parquet file, a folder of them, a hub dataset as hf:NAME[:SPLIT], or a prepared data set."""
    show: Annotated[int, Range(0)] = 3
    """Samples to print, evenly spaced over the file."""


def inspect(options: InspectOptions, console: Console | None = None) -> dict[str, Any]:
    """Print samples and counts; returns the counts."""
    console = console or Console(highlight=False, soft_wrap=True)
    preparation = options.preparation([options.file])
    if is_prepared(options.file):  # and cut, at whatever length
        preparation = replace(preparation, max_length=preparation.positions)
    data = prepare(preparation)
    samples = data.samples
    for index in evenly_spaced(len(samples), options.show):
        sample, kind = samples[index], samples.kind(index) or "no kind"
        console.rule(f"{samples.place(sample.row)}, {kind}, {len(sample.ids)} tokens")
        console.print(marked(preparation.chat.tokenizer, sample, coloured=console.is_terminal))
    counts = count_samples(data, samples)
    console.rule("counts")
    console.print(table(counts))
    for line in [*template_warnings(preparation.chat.record(), preparation.sources), *cut_at_positions(preparation)]:
        console.print(line)
    for why in data.dropped:
        console.print(Text(f"{why}: {', '.join(data.dropped_at(why))}"))
    return counts


def evenly_spaced(length: int, count: int) -> list[int]:
    """`count` indices into `length` samples at even distances, starting with the first."""
    count = min(count, length)
    return [i * length // count for i in range(count)]


def marked(tokenizer: Any, sample: Sample, *, coloured: bool) -> Text:
    """The sample's text, supervised runs coloured, or in ⟦brackets⟧ without colours."""
    text = Text()
    flags, start = sample.supervised.tolist(), 0
    for end in range(1, len(flags) + 1):
        if end < len(flags) and flags[end] == flags[start]:
            continue
        run = tokenizer.decode(sample.ids[start:end].tolist(), skip_special_tokens=False)
        if not flags[start]:
            text.append(run)
        elif coloured:
            text.append(run, SUPERVISED_STYLE)
        else:
            text.append(f"⟦{run}⟧")
        start = end
    return text


def count_samples(data: Prepared, samples: PreparedSamples) -> dict[str, Any]:
    """Conversations, samples, tokens, kinds, the models that wrote them, what was dropped, and what was noticed."""
    counts = data.counts
    names = {"rows": "conversations", "replaced": "surrogates replaced"}
    order = ("rows", "usable", "samples", "truncated", "tokens", "supervised tokens", "longest", "replaced")
    kinds = {name or "?": count for name, count in samples.kinds().most_common()}
    return {names.get(name, name): counts[name] for name in order} | {
        "kinds": kinds,
        "written by": {name or "not recorded": n for name, n in data.written_by.most_common()},
        "noticed": data.index["notes"],
        "dropped": data.dropped,
    }


def table(counts: dict[str, Any]) -> Table:
    """The counts, one per line; nested ones below their name."""
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    lines.add_column()
    lines.add_column(justify="right")
    for name, value in counts.items():
        if not isinstance(value, dict):
            lines.add_row(name, f"{value:,}")
        elif not value:
            lines.add_row(name, "0")
        else:
            lines.add_row(name, f"{sum(value.values()):,}" if name == "dropped" else "")
            for key, number in value.items():
                lines.add_row(Text(f"  {key}"), f"{number:,}")
    return lines
