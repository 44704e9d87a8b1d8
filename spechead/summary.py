"""`spechead summary RUN`: the figures of a run, where its files lie, and what to try next.

Knows nothing but the layout of a run's folder and the schema of report.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spechead.errors import UserError
from spechead.files import read_json

PROMPT = "Explain why the sky is blue."


@dataclass
class SummaryOptions:
    """A run's figures, its files, and what to try next."""

    run: str
    """Folder of the run, which holds head/ and eval/report.json."""


def summary(options: SummaryOptions) -> None:
    """Print the table and the paths."""
    run = Path(options.run)
    path = run / "eval" / "report.json"
    if not path.is_file():
        raise UserError(f"no report at {path}: run spechead eval --head {run}/head --out {run}/eval first")
    report = read_json(path)
    if report.get("schema") != 1:
        raise UserError(f"{path} has schema {report.get('schema')}, expected 1: evaluate again")
    console = Console(highlight=False)
    console.print()
    console.print(figures(report))
    console.print()
    for what, where in places(run):
        console.print(f"  {what:<18}{where}", soft_wrap=True)
    console.print("\nTry it:")
    console.print(f'  spechead generate --head {run}/head --prompt "{PROMPT}"', soft_wrap=True)


def figures(report: dict[str, Any]) -> Table:
    """One column a suite, one line a figure."""
    table = Table(
        title=f"{report['kind']} head for {report['target']}, {report['dtype']} on {report['device']}"
    )
    table.add_column("")
    suites = report["suites"]
    for name, suite in suites.items():
        table.add_column(f"{name} ({suite['prompts']} prompts)", justify="right")
    rows = {
        "acceptance length": lambda s: spread(s, "acceptance_length"),
        "speed-up": lambda s: spread(s, "speedup", "x"),
        "tokens per second": lambda s: f"{s['speculative_tokens_per_s']:.1f}",
        "plain decoding": lambda s: f"{s['plain_tokens_per_s']:.1f}",
        "text identical to plain decoding": lambda s: "{equal}/{checked} prompts".format(**s["lossless"]),
    }
    for label, show in rows.items():
        table.add_row(label, *(show(suite) for suite in suites.values()))
    return table


def spread(suite: dict[str, Any], key: str, before: str = "") -> str:
    """A figure with its 95 % interval."""
    value, interval = suite[key], suite.get(f"{key}_ci")
    if value is None:
        return "-"
    return f"{before}{value:.2f}" + ("  [{:.2f}, {:.2f}]".format(*interval) if interval else "")


def places(run: Path) -> list[tuple[str, Path]]:
    """The files of a run that exist, with what they are."""
    known = [
        ("head", run / "head"),
        ("report", run / "eval" / "report.html"),
        ("report as JSON", run / "eval" / "report.json"),
        ("training curve", run / "training_curve.png"),
    ]
    return [(what, where) for what, where in known if where.exists()]
