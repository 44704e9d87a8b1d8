"""The model card of an exported head: what it is for, how it is served, and what it measured.

It contains no path of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spechead.evaluation.report import identical, is_lossy, labelled, main_suite, number, verdict, with_interval
from spechead.files import write_text
from spechead.formats.files import TEMPLATE
from spechead.heads import Head


def write_card(
    path: Path,
    head: Head,
    target_id: str,
    server: str,
    command: str,
    *,
    meta: Mapping[str, Any],
    report: Mapping[str, Any] | None,
    license: str,
) -> None:
    """Write the card. `command` serves the head, `meta` describes its training, `report` its evaluation, if any."""
    from huggingface_hub import ModelCardData

    tags = ["speculative-decoding", head.kind]
    front = ModelCardData(license=license or "other", base_model=target_id, tags=tags).to_yaml().strip()
    options = {name: value for name, value in asdict(head.config).items() if value not in ("", None)}
    lines = ["---", front, "---", f"# {head.title} head for {target_id}", ""]
    lines += [
        f"A head for speculative decoding: it drafts tokens that {target_id} then verifies, so that text is generated "
        f"faster and remains the target's own. Trained and exported with spechead, in the format of {server}.",
        "",
        "## Serve",
        "Run this in the folder that contains this one; other versions of the server may expect other names.",
        "```",
        command,
        "```",
        *_template(meta),
        "",
        "## Results",
        *_results(report),
        "",
        "## Training",
        f"- data: {_file_names(meta.get('data'))}",
        f"- optimizer steps: {meta.get('steps', 'not recorded')}",
        *(f"- {name}: {value}" for name, value in options.items()),
        "",
        "## Licence",
        license or "Not given. The licences of the target and of the training data apply to works derived from them.",
    ]
    write_text(path, "\n".join(lines) + "\n")


def _results(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        return ["Not measured (`spechead eval` writes a report.json)."]
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
        f"| {labelled(str(entry.get('tree')), entry)} | {length} | {speed} | {plain} -> {fast} | {identical(entry)} |",
    ]
    return [*lines, "", f"**{verdict(entry)[1]}.**"] if is_lossy(entry) else lines


def _template(meta: Mapping[str, Any]) -> list[str]:
    """What the server must be given so that its prompts have the form that the head was trained on."""
    lines = []
    if meta.get("chat_template"):
        lines.append(f"The head was trained with the chat template in {TEMPLATE}: serve the target with it.")
    if meta.get("template_date"):
        lines.append(f"The chat template printed {meta['template_date']} as the date; servers print the day.")
    if meta.get("template_kwargs"):
        lines.append(f"The chat template was given {meta['template_kwargs']}: requests need the same keywords.")
    return ["", *lines] if lines else []


def _file_names(data: Any) -> str:
    """Names of data files without the folders of this machine."""
    sources = [str(source) for source in (data if isinstance(data, list) else [data] if data else [])]
    return ", ".join(Path(s).name if s.startswith(("/", "~")) else s for s in sources) or "not recorded"
