"""Compare the chat template in use with the one recorded with a head or with data."""

import json
from os.path import isfile
from pathlib import Path
from typing import Any

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


def recorded_template(source: str) -> Record | None:
    """The template with which spechead wrote the JSONL file `source`, from its .meta.json.

    None without such a record: data of other origin, hub datasets. Raises UserError if the record is not JSON.
    """
    path = Path(source + ".meta.json")
    meta = read_json(path) if isfile(path) else None
    options = meta.get("options") if isinstance(meta, dict) else None
    return options if isinstance(options, dict) else None
