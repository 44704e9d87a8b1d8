"""`spechead data inspect`: print samples of a file with the supervised tokens marked, and counts.

Look at this before training: a wrong supervision mask raises no error.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spechead.data.dataset import Conversation, Sample, Samples, build_samples, count_by_model, read_conversations
from spechead.options import Range
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.loading import load_tokenizer
from spechead.target.options import TargetName

SUPERVISED_STYLE = "black on color(114)"


@dataclass
class InspectOptions(TargetName):
    """Which conversations to inspect, and how many to print."""

    file: str
    """JSONL file, or a hub dataset as hf:NAME[:SPLIT]."""
    target: str = field(default=BUNDLED, kw_only=True)
    """Bundled target, local folder or hub id whose chat template and tokenizer are used."""
    max_length: Annotated[int, Range(1)] = 512
    """Conversations are cut after this many tokens."""
    show: Annotated[int, Range(0)] = 3
    """Samples to print, evenly spaced over the file."""
    limit: Annotated[int, Range(0)] = 0
    """Conversations to read; 0 for all."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}."""


def inspect(options: InspectOptions, console: Console | None = None) -> dict[str, Any]:
    """Print samples and counts; returns the counts."""
    console = console or Console(highlight=False, soft_wrap=True)
    conversations = read_conversations(options.file, options.limit)
    tokenizer = load_tokenizer(options.target, trust_remote_code=options.trust_remote_code)
    samples = build_samples(conversations, tokenizer, options.max_length, options.template_kwargs)
    for sample in evenly_spaced(samples.items, options.show):
        kind = (conversations[sample.row].get("meta") or {}).get("kind", "no kind")
        console.rule(f"conversation {sample.row}, {kind}, {len(sample.ids)} tokens")
        console.print(marked(tokenizer, sample, coloured=console.is_terminal))
    counts = count_samples(conversations, samples)
    console.rule("counts")
    console.print(table(counts))
    return counts


def evenly_spaced(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples at even distances, starting with the first."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


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


def count_samples(conversations: Sequence[Conversation], samples: Samples) -> dict[str, Any]:
    """Conversations, tokens, kinds, the models that wrote them, and what was dropped."""
    kinds = Counter(str((conversations[s.row].get("meta") or {}).get("kind", "?")) for s in samples.items)
    return {
        "conversations": len(conversations),
        "usable": len(samples.items),
        "truncated": samples.truncated,
        "tokens": sum(len(s.ids) for s in samples.items),
        "supervised tokens": sum(int(s.supervised.sum()) for s in samples.items),
        "longest": max(len(s.ids) for s in samples.items),
        "kinds": dict(kinds.most_common()),
        "written by": {name or "not recorded": n for name, n in count_by_model(conversations).most_common()},
        "dropped": samples.dropped,
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
                lines.add_row(f"  {key}", f"{number:,}")
    return lines
