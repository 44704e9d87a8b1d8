"""An evaluation in words: the table on the console, and the remarks that no reader must miss.

Reads only the report dictionary that evaluate.py writes to report.json. Knows nothing of models; the same in
HTML is page.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 140  # of a table that goes into a file or a pipe
MISSING = "-"
NOISE = 1.05  # plain decoding this much slower than generate is no longer noise of the clock


# ------------------------------------------------------------------------------------------------ words


def main_suite(report: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The first suite: all prompts with the main tree."""
    return next(iter(report["suites"].items()))


def whole_suites(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The suites of all prompts, one a tree: those of single kinds repeat the main one's prompts."""
    name, _ = main_suite(report)
    return {key: entry for key, entry in report["suites"].items() if not key.startswith(f"{name}/")}


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, bounds: Sequence[float] | None, prefix: str = "") -> str:
    """`1.44 [1.38, 1.51]`"""
    shown = number(value) if value is None else prefix + number(value)
    return shown if bounds is None else f"{shown} [{number(bounds[0])}, {number(bounds[1])}]"


def identical(entry: dict[str, Any]) -> str:
    return f"{entry['lossless']['equal']}/{entry['lossless']['checked']}"


def title(report: dict[str, Any]) -> str:
    return f"{report['kind']} head on {report['target']}"


def remarks(report: dict[str, Any]) -> list[tuple[bool, str]]:
    """What a reader must not miss: (is it an alarm, sentence)."""
    found = [remark for key, entry in whole_suites(report).items() for remark in _differences(report, key, entry)]
    entry = main_suite(report)[1]
    ratio, reference = entry["generate_ratio"], entry["generate_equal"]
    if ratio is not None and ratio > NOISE:
        slower = f"plain decoding takes {ratio:.2f} times as long as transformers' generate"
        found.append((True, f"{slower}: the speed-up is flattered"))
    if reference["equal"] < reference["checked"]:
        same = f"{reference['equal']}/{reference['checked']} prompts"
        found.append((False, f"plain decoding and transformers' generate wrote the same text on {same}"))
    costs, tau = entry["costs"], entry["acceptance_length"]
    if costs is not None and tau is not None:
        parts = ", ".join(f"{name} {costs[name]:.2f}" for name in ("verify", "draft", "rest"))
        cost = f"a pass costs {costs['break_even']:.2f} plain passes ({parts})"
        found.append((False, f"{cost} and yields {tau:.2f} tokens"))
    if entry["speedup"] is not None and entry["speedup"] < 1:
        slower = f"speculation is slower than plain decoding here: x{entry['speedup']:.2f}"
        found.append((True, f"{slower}; a smaller tree may help"))
    return found


def _differences(report: dict[str, Any], name: str, entry: dict[str, Any]) -> list[tuple[bool, str]]:
    """Float32 must give equal text. In half precision a near tie may fall the other way in a wider pass."""
    differing = entry["lossless"]["divergences"]
    if not differing:
        return []
    first = differing[0]
    gaps = [d["gap"] for d in differing if d["gap"] is not None]
    where = f"first: prompt {first['prompt']}, token {first['position']}"
    near = f"; gap between the two best logits there at most {max(gaps):.3g}" if gaps else ""
    count = f"{len(differing)} of {entry['lossless']['checked']} prompts"
    if report["dtype"] == "float32":
        return [(True, f"NOT LOSSLESS: {name}: {count} differ from plain decoding in float32 ({where}{near})")]
    return [(False, f"{name}: {count} differ from plain decoding in {report['dtype']} ({where}{near})")]


# ------------------------------------------------------------------------------------------------ console

COLUMNS = (
    "prompts",
    "suite",
    "tokens per pass [95 %]",
    "speed-up [95 %]",
    "tokens/s",
    "identical",
    "plain/generate",
)


def cells(name: str, entry: dict[str, Any]) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    speeds = f"{number(entry['plain_tokens_per_s'], 1)} -> {number(entry['speculative_tokens_per_s'], 1)}"
    return [
        str(entry["prompts"]),
        name,
        with_interval(entry["acceptance_length"], entry["acceptance_length_ci"]),
        with_interval(entry["speedup"], entry["speedup_ci"], "x"),
        speeds,
        identical(entry),
        "x" + number(entry["generate_ratio"]) if entry["generate_ratio"] is not None else MISSING,
    ]


def print_report(report: dict[str, Any], out: Path, console: Console | None = None) -> None:
    """The table and the remarks; plain aligned text where the output is not a terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH, color_system=None)
    table = Table(
        box=None,
        title=Text(f"{title(report)}, {report['dtype']}"),
        title_justify="left",
        padding=(0, 2, 0, 0),
    )
    for column in COLUMNS:
        table.add_column(column, justify="right" if column == "prompts" else "left", overflow="fold")
    for index, (name, entry) in enumerate(report["suites"].items()):
        table.add_row(*(Text(cell) for cell in cells(name, entry)), style="bold" if index == 0 else None)
    console.print(table)
    for alarm, sentence in remarks(report):
        console.print(Text(sentence, style="bold red" if alarm else "dim"), soft_wrap=True)
    _, entry = main_suite(report)
    same = entry["lossless"]["equal"] == entry["lossless"]["checked"]
    console.print(
        Text(
            f"text identical to plain decoding: {identical(entry)} prompts",
            style="green" if same else "bold red",
        )
    )
    console.print(Text(f"report: {out / 'report.html'}"), soft_wrap=True)
