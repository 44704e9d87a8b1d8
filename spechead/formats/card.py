"""The model card of an exported head: what it is for, what it measured, and how it is served.

Knows nothing of models; writes no path of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spechead.evaluation.report import identical, is_lossy, main_suite, named, number, verdict, with_interval
from spechead.files import write_text

_WORDS = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "medusa": "Medusa"}


def write_card(
    path: Path,
    kind: str,
    target_id: str,
    server: str,
    command: str,
    *,
    options: Mapping[str, Any],
    meta: Mapping[str, Any],
    report: Mapping[str, Any] | None,
    license: str,
) -> None:
    """`options` of the head, `meta` of its training, `report` of its evaluation where there is one."""
    word = _WORDS.get(kind, kind)
    front = [
        f"license: {license or 'other'}",
        f"base_model: {target_id}",
        "tags:",
        "- speculative-decoding",
        f"- {kind}",
    ]
    lines = ["---", *front, "---", f"# {word} head for {target_id}", ""]
    lines += [
        f"A speculative head: it drafts tokens that {target_id} then verifies, so that text is written faster and "
        f"stays the target's own. Trained and exported with spechead, in the form of {server}.",
        "",
        "## Serve",
        "Start it where this folder lies; other versions of the server may read other names.",
        "```",
        command,
        "```",
        "",
        "## Results",
        *_results(report),
        "",
        "## Training",
        f"- data: {_last_parts(meta.get('data'))}",
        f"- optimizer steps: {meta.get('steps', 'not recorded')}",
        *(f"- {name}: {value}" for name, value in options.items()),
        "",
        "## Licence",
        license or "Not given. The target's licence and those of the training data apply to what is derived from them.",
    ]
    write_text(path, "\n".join(lines) + "\n")


def _results(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        return ["Not measured here (`spechead eval` writes a report.json)."]
    name, entry = main_suite(dict(report))
    length = with_interval(entry.get("acceptance_length"), entry.get("acceptance_length_ci"))
    speed = with_interval(entry.get("speedup"), entry.get("speedup_ci"), "x")
    plain, fast = (number(entry.get(f"{way}_tokens_per_s"), 1) for way in ("plain", "speculative"))
    machine = report.get("machine", {})
    lines = [
        f"Measured by spechead itself on {entry.get('prompts')} prompts ({name}), {report.get('dtype')}, "
        f"{machine.get('processor', report.get('device'))}; a server's own speed differs.",
        "",
        "| drafts | tokens per pass [95 %] | speed-up [95 %] | tokens/s plain -> speculative | text identical |",
        "|---|---|---|---|---|",
        f"| {named(str(entry.get('tree')), entry)} | {length} | {speed} | {plain} -> {fast} | {identical(entry)} |",
    ]
    return [*lines, "", f"**{verdict(entry)[1]}.**"] if is_lossy(entry) else lines


def _last_parts(data: Any) -> str:
    """Names of data files, without the folders of this machine."""
    sources = data if isinstance(data, list) else [data] if data else []
    return ", ".join(
        Path(str(source)).name if str(source).startswith(("/", "~")) else str(source) for source in sources
    ) or ("not recorded")
