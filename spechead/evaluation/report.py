"""An evaluation in words: the table on the console, and the remarks that no reader must miss.

Functions of the report dictionary that evaluate.py writes to report.json; page.py presents the same in HTML.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 140  # of a table that goes into a file or a pipe
MISSING = "-"
NOISE = 1.05  # plain decoding slower than generate by more than this factor is not timing noise


# ------------------------------------------------------------------------------------------------ words


def main_suite(report: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The first suite: all prompts with the main tree."""
    return next(iter(report["suites"].items()))


def whole_suites(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The suites of all prompts, one per drafter and tree, by label; those of one category repeat the main one."""
    main, _ = main_suite(report)
    return {labelled(name, entry): entry for name, entry in report["suites"].items() if not name.startswith(f"{main}/")}


def tables(report: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """All suites by label, in one table or two: numbers of a lossy rule are kept separate."""
    by_lossy: dict[bool, dict[str, dict[str, Any]]] = {}
    for name, entry in report["suites"].items():
        by_lossy.setdefault(is_lossy(entry), {})[labelled(name, entry)] = entry
    return list(by_lossy.values())


def is_lossy(entry: dict[str, Any]) -> bool:
    """Whether the suite's text may leave the target's distribution; the oldest reports have no such entry."""
    return bool(entry.get("lossy"))


def labelled(name: str, entry: dict[str, Any]) -> str:
    """`name`, marked if its numbers are those of a lossy rule."""
    return f"{name} (lossy)" if is_lossy(entry) else name


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, bounds: Sequence[float] | None, prefix: str = "") -> str:
    """`1.44 [1.38, 1.51]`"""
    shown = number(value) if value is None else prefix + number(value)
    return shown if bounds is None else f"{shown} [{number(bounds[0])}, {number(bounds[1])}]"


def identical(entry: dict[str, Any]) -> str:
    if is_lossy(entry):
        return "lossy"
    lossless = entry["lossless"]
    return f"{lossless['equal']}/{lossless['checked']}" if lossless["checked"] else "not compared"


def verdict(entry: dict[str, Any]) -> tuple[bool, str]:
    """The verdict on the suite's text: (is it as it should be, sentence)."""
    if is_lossy(entry):
        return False, f"LOSSY: under the rule {entry['rule']} the text does not follow the target's distribution"
    lossless = entry["lossless"]
    if not lossless["checked"]:
        same = f"under the rule {entry['rule']} the text follows plain decoding's distribution (tests enumerate it)"
        return True, f"{same} with other samples: equality is not expected and was not checked"
    return lossless["equal"] == lossless["checked"], f"text identical to plain decoding: {identical(entry)} prompts"


def title(report: dict[str, Any]) -> str:
    drafter = report["kind"] if report.get("head") == "" else f"{report['kind']} head"
    return labelled(f"{drafter} on {report['target']}", main_suite(report)[1])


def precision(report: dict[str, Any]) -> str:
    """The target's dtype, and that of a head or draft model if it differs."""
    settings = report["settings"]
    drafts = settings.get("draft_dtype", report["dtype"])
    loaded = report["head"] or any("draft_model:" in name for name in settings.get("drafter", ()))
    return f"{report['dtype']}, drafts in {drafts}" if loaded and drafts != report["dtype"] else str(report["dtype"])


def remarks(report: dict[str, Any]) -> list[tuple[bool, str]]:
    """(is it an alarm, sentence) for each remark."""
    notes = [remark for key, entry in whole_suites(report).items() for remark in _differences(report, key, entry)]
    entry = main_suite(report)[1]
    ratio, reference = entry["generate_ratio"], entry["generate_equal"]
    if ratio is not None and ratio > NOISE:
        slower = f"plain decoding takes {ratio:.2f} times as long as transformers' generate"
        notes.append((True, f"{slower}: the speed-up is overstated"))
    if reference["equal"] < reference["checked"]:
        same = f"{reference['equal']}/{reference['checked']} prompts"
        notes.append((False, f"plain decoding and transformers' generate wrote the same text on {same}"))
    if foreign := report["settings"].get("foreign_data"):
        notes.append((False, f"the head was trained on answers of other models: {foreign}"))
    costs, tau = entry["costs"], entry["acceptance_length"]
    if costs is not None and tau is not None:
        parts = ", ".join(f"{name} {costs[name]:.2f}" for name in ("verify", "draft", "rest"))
        cost = f"a pass costs {costs['break_even']:.2f} plain passes ({parts})"
        notes.append((False, labelled(f"{cost} and yields {tau:.2f} tokens", entry)))
    if entry["speedup"] is not None and entry["speedup"] < 1:
        slower = labelled(f"speculation is slower than plain decoding here: x{entry['speedup']:.2f}", entry)
        notes.append((True, f"{slower}; a smaller tree may help"))
    return notes


def _differences(report: dict[str, Any], name: str, entry: dict[str, Any]) -> list[tuple[bool, str]]:
    """Float32 must yield equal text; in half precision a wider pass may turn a near tie."""
    differing = entry["lossless"]["divergences"]
    if not differing:
        return []
    first = differing[0]
    gaps = [d["gap"] for d in differing if d["gap"] is not None]
    where = f"first: prompt {first['prompt']}, token {first['position']}"
    gap = f"; gap between the two best logits there at most {max(gaps):.3g}" if gaps else ""
    count = f"{len(differing)} of {entry['lossless']['checked']} prompts"
    if report["dtype"] == "float32":
        return [(True, f"NOT LOSSLESS: {name}: {count} differ from plain decoding in float32 ({where}{gap})")]
    return [(False, f"{name}: {count} differ from plain decoding in {report['dtype']} ({where}{gap})")]


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
    """Print the tables and the remarks; plain aligned text if the output is not a terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PLAIN_WIDTH, color_system=None)
    for index, suites in enumerate(tables(report)):
        heading = f"{title(report)}, {precision(report)}" if index == 0 else ""
        console.print(_table(suites, heading))
    for alarm, sentence in remarks(report):
        console.print(Text(sentence, style="bold red" if alarm else "dim"), soft_wrap=True)
    good, sentence = verdict(main_suite(report)[1])
    console.print(Text(sentence, style="green" if good else "bold red"), soft_wrap=True)
    console.print(Text(f"report: {out / 'report.html'}"), soft_wrap=True)


def _table(suites: dict[str, dict[str, Any]], heading: str) -> Table:
    table = Table(box=None, title=Text(heading), title_justify="left", padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column == "prompts" else "left", overflow="fold")
    for index, (name, entry) in enumerate(suites.items()):
        table.add_row(*(Text(cell) for cell in cells(name, entry)), style="bold" if index == 0 else None)
    return table
