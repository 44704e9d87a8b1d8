"""Compare the chat template in use with the one recorded with a head or with data."""

import datetime
import json
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

from spechead.data.preparation.prepared import INDEX
from spechead.files import read_json

Record = dict[str, Any]  # as `ChatTemplate.record` gives it


def template_warning(used: Record, recorded: Record | None, what: str) -> str:
    """One line if the template or its keywords differ, else "". `what`: subject and verb for `recorded`, such as
    "head runs/a/head was trained"; `recorded` is None where it is unknown. A date may differ."""
    if recorded is None:
        return ""
    now, before = used.get("template_kwargs") or {}, recorded.get("template_kwargs") or {}
    worse = "where the prompts' form differs, drafts fit worse"
    if now != before:
        return f"{what} with template keywords {json.dumps(before)}, here they are {json.dumps(now)}: {worse}"
    if (used.get("chat_template") or "") != (recorded.get("chat_template") or ""):
        return f"{what} with another chat template: {worse}"
    return ""


def recorded_date(*records: Path) -> str:
    """The date that the first of these JSON records names, at its top or below `options`; today's where none does."""
    for path in records:
        record = read_json(path) if path.is_file() else None
        options = record.get("options", record) if isinstance(record, dict) else None
        if isinstance(options, dict) and options.get("template_date"):
            return str(options["template_date"])
    return datetime.date.today().isoformat()


def template_warnings(used: Record, sources: Sequence[str]) -> list[str]:
    """A line for each of the data sources that was written or prepared with another template."""
    found = (template_warning(used, recorded_template(name), f"{name} was written") for name in sources)
    return [f"{line} (options template_kwargs, chat_template)" for line in found if line]


def date_of_data(sources: Sequence[str]) -> str:
    """The date with which the first of the sources was rendered that records one; empty if none does."""
    return next((date for source in sources if (date := (recorded_template(source) or {}).get("template_date"))), "")


def recorded_template(source: str) -> Record | None:
    """The template with which spechead wrote the JSONL file `source`, from its .meta.json, or prepared the folder.

    None without such a record: data of other origin, hub datasets. Raises UserError if the record is not JSON.
    """
    for path, key in ((Path(source + ".meta.json"), "options"), (Path(source) / INDEX, "template")):
        meta = read_json(path) if isfile(path) else None
        record = meta.get(key) if isinstance(meta, dict) else None
        if isinstance(record, dict):
            return record
    return None
