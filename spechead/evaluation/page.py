"""report.html: an evaluation as one file that needs nothing else, readable on light and dark screens.

Reads only the report dictionary; the words and numbers are those of report.py, the plots those of plots.py.
Every text is escaped.
"""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spechead.evaluation import plots
from spechead.evaluation.report import (
    COLUMNS,
    MISSING,
    cells,
    identical,
    main_suite,
    named,
    number,
    remarks,
    tables,
    title,
    verdict,
    with_interval,
)
from spechead.files import write_text

SHOWN_DEPTHS = 6  # the examples colour deeper drafts like this one


def write_html(report: dict[str, Any], path: Path) -> None:
    write_text(path, render_html(report))


def render_html(report: dict[str, Any]) -> str:
    entry = main_suite(report)[1]
    about = f"{report['dtype']} on {report['device']}, tree {entry['tree']}, rule {entry['rule']}"
    body = BODY.format(
        title=escape(title(report)),
        subtitle=escape(f"{about}, {entry['prompts']} prompts"),
        cards=_cards(entry),
        remarks="".join(
            f'<li class="{"alarm" if alarm else "note"}">{escape(text)}</li>' for alarm, text in _remarks(report)
        ),
        tables="".join(map(_table, tables(report))),
        figures=_figures(report),
        legend=_legend(),
        examples="".join(_example(example) for example in report["examples"]),
        settings=pairs(report["settings"] | {"head": report["head"], "target": report["target"]}),
        machine=pairs(report["machine"] | {"device": report["device"]}),
    )
    return whole_page(title(report), body)


# ------------------------------------------------------------------------------------------------ parts of any page


def whole_page(heading: str, body: str) -> str:
    """A file that needs nothing else, around a body that is HTML."""
    return PAGE.format(title=escape(heading), style=STYLE, body=body)


def escape(value: Any) -> str:
    return html.escape(str(value), quote=True)


def figure(label: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(label)}</figcaption>{svg}</figure>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def pairs(values: dict[str, Any]) -> str:
    return "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value if value not in ('', [], None) else MISSING)}</dd>"
        for key, value in values.items()
    )


# ------------------------------------------------------------------------------------------------ parts of a report


def _remarks(report: dict[str, Any]) -> list[tuple[bool, str]]:
    """The remarks, and what is known of the text where no card tells it."""
    entry = main_suite(report)[1]
    good, sentence = verdict(entry)
    return [(not good, sentence), *remarks(report)] if not entry["lossless"]["checked"] else remarks(report)


def _figures(report: dict[str, Any]) -> str:
    entry = main_suite(report)[1]
    figures = [
        (named("Acceptance by depth", entry), plots.acceptance(entry)),
        (named("Time per pass", entry), plots.phases(entry)),
        *((named("Speed-up", next(iter(suites.values()))), plots.speedups(suites)) for suites in tables(report)),
        (named("Tokens per pass", entry), plots.tokens_per_pass(entry)),
    ]
    return "".join(figure(label, svg) for label, svg in figures)


def _cards(entry: dict[str, Any]) -> str:
    cards = [
        ("tokens per pass", entry["acceptance_length"], entry["acceptance_length_ci"], ""),
        ("speed-up over plain decoding", entry["speedup"], entry["speedup_ci"], "x"),
        (
            "speed-up without prefill",
            entry["without_prefill"]["speedup"],
            entry["without_prefill"]["speedup_ci"],
            "x",
        ),
    ]
    shown = [(with_interval(value, None, prefix), label, _bounds(bounds)) for label, value, bounds, prefix in cards]
    if entry["lossless"]["checked"]:
        shown.append((identical(entry), "prompts with text identical to plain decoding", ""))
    predicted = entry["predicted"]["speedup"]
    if predicted is not None:
        shown.append(("x" + number(predicted), "speed-up predicted by the speed model, without prefill", ""))
    return "".join(
        f'<div class="card"><b>{escape(value)}</b>{escape(named(label, entry))}<small>{escape(more)}</small></div>'
        for value, label, more in shown
    )


def _bounds(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"95 %: {number(bounds[0])} to {number(bounds[1])}"


def _table(suites: dict[str, dict[str, Any]]) -> str:
    return table(COLUMNS[1:], [cells(name, entry)[1:] for name, entry in suites.items()])


def _example(example: dict[str, Any]) -> str:
    pieces = "".join(_piece(text, depth) for text, depth in example["pieces"])
    return (
        f"<details><summary>{escape(example['category'])}</summary>"
        f'<p class="prompt">{escape(example["text"])}</p><p class="answer">{pieces}</p></details>'
    )


def _piece(text: str, depth: int) -> str:
    if depth == 0:
        return escape(text)
    shade = min(depth, SHOWN_DEPTHS)
    return f'<span class="d{shade}" title="accepted draft of depth {depth}">{escape(text)}</span>'


def _legend() -> str:
    marks = "".join(f'<span class="d{depth}">depth {depth}</span> ' for depth in range(1, SHOWN_DEPTHS))
    deepest = f'<span class="d{SHOWN_DEPTHS}">depth {SHOWN_DEPTHS} or more</span>'
    return f"accepted drafts of {marks}{deepest}; unmarked: written by the target"


# Tints of Okabe and Ito's palette, which colour-blind readers tell apart; thin enough for dark and light.
STYLE = """
:root { color-scheme: light dark; --line: rgba(128, 128, 128, .35); --soft: rgba(128, 128, 128, .12); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h1 + p { margin-top: 0; opacity: .75; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .8rem; }
.cards { margin: 1.5rem 0; }
.card { background: var(--soft); border-radius: .6rem; padding: .8rem 1rem; }
.card { display: flex; flex-direction: column; }
.card b { font-size: 1.9rem; line-height: 1.2; } .card small { opacity: .75; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 10rem; }
tbody tr:first-child { font-weight: 600; }
.figures { display: grid; gap: 1.5rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
.remarks { padding: 0; list-style: none; }
.remarks li { padding: .3rem .8rem; border-left: .3rem solid var(--line); }
.remarks .alarm { border-color: #d55e00; font-weight: 600; background: rgba(213, 94, 0, .12); }
details { border-top: 1px solid var(--line); padding: .5rem 0; }
summary { cursor: pointer; font-weight: 600; }
.prompt { white-space: pre-wrap; padding-left: 1rem; border-left: .2rem solid var(--line); opacity: .8; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.7; }
.d1, .d2, .d3, .d4, .d5, .d6 { border-radius: .2rem; padding: .1rem 0; }
.d1 { background: rgba(86, 180, 233, .35); } .d2 { background: rgba(0, 158, 115, .35); }
.d3 { background: rgba(230, 159, 0, .40); } .d4 { background: rgba(204, 121, 167, .45); }
.d5 { background: rgba(213, 94, 0, .45); } .d6 { background: rgba(128, 128, 128, .45); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { opacity: .75; } dd { margin: 0; overflow-wrap: anywhere; }
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
{body}
</html>
"""

BODY = """<h1>{title}</h1>
<p>{subtitle}</p>
<div class="cards">{cards}</div>
<ul class="remarks">{remarks}</ul>
<h2>Results</h2>
{tables}
<p>Tokens per pass: tokens committed by the target's passes over passes, the bonus token included, pooled over
the prompts; plain decoding has 1. Speed-up: plain seconds per token over speculative seconds per token,
prefill included, the runs of the two interleaved. Brackets: 95 % intervals by bootstrap over prompts.
Plain/generate: seconds per token of plain decoding over those of transformers' own generate.</p>
<h2>Plots</h2>
<div class="figures">{figures}</div>
<h2>Examples</h2>
<p>{legend}</p>
{examples}
<h2>Settings</h2>
<dl>{settings}</dl>
<h2>Machine</h2>
<dl>{machine}</dl>"""
