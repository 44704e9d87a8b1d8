"""report.html: an evaluation as one file that needs nothing else, readable on light and dark screens.

The words and numbers are those of report.py. The templates escape every value; only the SVG of plots.py is inserted as
markup.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spechead.evaluation import plots
from spechead.evaluation.report import (
    COLUMNS,
    cells,
    identical,
    labelled,
    main_suite,
    number,
    remarks,
    tables,
    title,
    verdict,
    with_interval,
)
from spechead.files import write_text

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
DEEPEST = 6  # deeper drafts in the examples are coloured like this depth


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder; every value is escaped."""
    return TEMPLATES.get_template(template).render(values)


def write_html(report: dict[str, Any], path: Path) -> None:
    write_text(path, render_html(report))


def render_html(report: dict[str, Any]) -> str:
    entry = main_suite(report)[1]
    about = f"{report['dtype']} on {report['device']}, tree {entry['tree']}, rule {entry['rule']}"
    return render(
        "report.html.j2",
        title=title(report),
        subtitle=f"{about}, {entry['prompts']} prompts",
        cards=_cards(entry),
        remarks=_remarks(report),
        columns=COLUMNS[1:],
        tables=[[cells(name, entry)[1:] for name, entry in suites.items()] for suites in tables(report)],
        plots=_plots(report),
        examples=report["examples"],
        deepest=DEEPEST,
        settings=report["settings"] | {"head": report["head"], "target": report["target"]},
        machine=report["machine"] | {"device": report["device"]},
    )


def _remarks(report: dict[str, Any]) -> list[tuple[bool, str]]:
    """The remarks, and the verdict on the text where no card shows it."""
    entry = main_suite(report)[1]
    good, sentence = verdict(entry)
    return remarks(report) if entry["lossless"]["checked"] else [(not good, sentence), *remarks(report)]


def _plots(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(caption, SVG)"""
    entry = main_suite(report)[1]
    return [
        (labelled("Acceptance by depth", entry), plots.acceptance(entry)),
        (labelled("Time per pass", entry), plots.phases(entry)),
        *((labelled("Speed-up", next(iter(suites.values()))), plots.speedups(suites)) for suites in tables(report)),
        (labelled("Tokens per pass", entry), plots.tokens_per_pass(entry)),
    ]


def _cards(entry: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(value, label, interval)"""
    decoding = entry["without_prefill"]
    figures = [
        ("tokens per pass", entry["acceptance_length"], entry["acceptance_length_ci"], ""),
        ("speed-up over plain decoding", entry["speedup"], entry["speedup_ci"], "x"),
        ("speed-up without prefill", decoding["speedup"], decoding["speedup_ci"], "x"),
    ]
    cards = [(with_interval(value, None, prefix), label, _bounds(bounds)) for label, value, bounds, prefix in figures]
    if entry["lossless"]["checked"]:
        cards.append((identical(entry), "prompts with text identical to plain decoding", ""))
    predicted = entry["predicted"]["speedup"]
    if predicted is not None:
        cards.append(("x" + number(predicted), "speed-up predicted by the speed model, without prefill", ""))
    return [(value, labelled(label, entry), interval) for value, label, interval in cards]


def _bounds(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"95 %: {number(bounds[0])} to {number(bounds[1])}"
