"""`spechead summary RUN`: the main figures of a run, its files, and what to try next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spechead.errors import UserError
from spechead.evaluation.report import identical, number, title, whole_suites, with_interval
from spechead.files import read_json
from spechead.options import Options

SCHEMA = 1
PROMPT = "Explain why the sky is blue."


@dataclass
class SummaryOptions(Options):
    """Print the main figures of a run, its files, and what to try next."""

    run: str
    """Folder of the run, which contains head/ and eval/report.json."""


def summary(options: SummaryOptions) -> None:
    """Print the table, the paths and the next command."""
    run = Path(options.run)
    path = run / "eval" / "report.json"
    if not path.is_file():
        raise UserError(f"option run: no report at {path}; first run spechead eval --head {run}/head --out {run}/eval")
    report = read_json(path)
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise UserError(f"{path}: not a report of schema {SCHEMA}, evaluate again")
    console = Console(highlight=False)
    console.print()
    console.print(figures(report))
    console.print()
    for what, where in places(run):
        console.print(f"{what:<16}{where}", soft_wrap=True, markup=False)
    console.print(f'\ntry it:         spechead generate --head {run}/head --prompt "{PROMPT}"', soft_wrap=True)


def figures(report: dict[str, Any]) -> Table:
    """One line per figure, one column per drafter and tree."""
    suites = whole_suites(report)
    headline = Text(f"{title(report)}, {report['dtype']} on {report['device']}")
    table = Table(title=headline, title_justify="left", box=None, padding=(0, 3, 0, 0), show_header=len(suites) > 1)
    table.add_column("")
    for name in suites:
        table.add_column(Text(name))
    rows = {
        "acceptance length [95 %]": [
            with_interval(s["acceptance_length"], s["acceptance_length_ci"]) for s in suites.values()
        ],
        "speed-up [95 %]": [with_interval(s["speedup"], s["speedup_ci"], "x") for s in suites.values()],
        "tokens per second": [
            f"{number(s['speculative_tokens_per_s'], 1)}, plain decoding {number(s['plain_tokens_per_s'], 1)}"
            for s in suites.values()
        ],
        "text identical to plain decoding": [
            identical(s) + (" prompts" if s["lossless"]["checked"] else "") for s in suites.values()
        ],
    }
    for label, cells in rows.items():
        table.add_row(label, *map(Text, cells))
    return table


def places(run: Path) -> list[tuple[str, Path]]:
    """The files of a run that exist: (what it is, path)."""
    known = [
        ("head", run / "head"),
        ("report", run / "eval" / "report.html"),
        ("report as JSON", run / "eval" / "report.json"),
        ("training curve", run / "training_curve.png"),
    ]
    return [(what, where) for what, where in known if where.exists()]
