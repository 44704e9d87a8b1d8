"""`spechead data inspect`: what a file teaches: samples with the supervised tokens marked, and counts.

Look at this before training: a wrong mask trains without complaint. Knows nothing of training.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spechead.data.dataset import Conversation, Sample, Samples, build_samples, read_conversations, written_by
from spechead.errors import UserError
from spechead.target.loading import load_tokenizer

SUPERVISED_STYLE = "black on color(114)"


@dataclass
class InspectOptions:
    """Which conversations to look at, and how many to show."""

    file: str
    """JSONL file, or a hub dataset as hf:NAME[:SPLIT]."""
    target: str = "smollm2-135m"
    """Embedded target, local folder or hub id whose chat template and tokenizer are used."""
    max_length: int = 512
    """Conversations are cut after this many tokens."""
    show: int = 3
    """Samples to print, spread over the file."""
    limit: int = 0
    """Conversations to read; 0 for all."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}."""
    trust_remote_code: bool = False
    """Let a hub model run its own Python code."""


def inspect(options: InspectOptions, console: Console | None = None) -> dict[str, Any]:
    """Print samples and counts; returns the counts."""
    if options.max_length < 1 or options.show < 0 or options.limit < 0:
        raise UserError("--max-length must be at least 1, --show and --limit at least 0")
    console = console or Console(highlight=False, soft_wrap=True)
    conversations = read_conversations(options.file, options.limit)
    tokenizer = load_tokenizer(options.target, trust_remote_code=options.trust_remote_code)
    samples = build_samples(conversations, tokenizer, options.max_length, options.template_kwargs)
    for sample in spread(samples.items, options.show):
        kind = (conversations[sample.row].get("meta") or {}).get("kind", "no kind")
        console.rule(f"conversation {sample.row}, {kind}, {len(sample.ids)} tokens")
        console.print(marked(tokenizer, sample, coloured=console.is_terminal))
    counts = count(conversations, samples)
    console.rule("counts")
    console.print(table(counts))
    return counts


def spread(samples: Sequence[Sample], number: int) -> list[Sample]:
    """`number` samples at even distances, the first one among them."""
    number = min(number, len(samples))
    return [samples[i * len(samples) // number] for i in range(number)]


def marked(tokenizer: Any, sample: Sample, *, coloured: bool) -> Text:
    """The sample's text, supervised runs coloured, or in ⟦brackets⟧ where there are no colours."""
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


def count(conversations: Sequence[Conversation], samples: Samples) -> dict[str, Any]:
    """Rows, tokens and origins, as numbers."""
    kinds = Counter(str((conversations[s.row].get("meta") or {}).get("kind", "?")) for s in samples.items)
    return {
        "conversations": len(conversations),
        "usable": len(samples.items),
        "truncated": samples.truncated,
        "tokens": sum(len(s.ids) for s in samples.items),
        "supervised tokens": sum(int(s.supervised.sum()) for s in samples.items),
        "longest": max(len(s.ids) for s in samples.items),
        "kinds": dict(kinds.most_common()),
        "written by": {name or "not said": n for name, n in written_by(conversations).most_common()},
        "dropped": samples.dropped,
    }


def table(counts: dict[str, Any]) -> Table:
    """The counts, one a line; nested ones below their name."""
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
