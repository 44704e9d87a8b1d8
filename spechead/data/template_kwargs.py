"""Compare the keywords of the chat template between data, training and decoding.

A keyword such as enable_thinking changes the text before an answer; a head trained on one form and used on another
drafts worse without any other sign.
"""

import json
from pathlib import Path
from typing import Any

from spechead.files import read_json

Keywords = dict[str, Any]


def template_warning(used: Keywords, recorded: Keywords | None, what: str) -> str:
    """One line if the keywords differ, else "". `what`: subject and verb for `recorded`, such as
    "head runs/a/head was trained"; `recorded` is None where it is unknown."""
    if recorded is None or used == recorded:
        return ""
    return (
        f"{what} with template keywords {json.dumps(recorded)}, here they are {json.dumps(used)}: "
        "where the prompts' form differs, drafts fit worse"
    )


def keywords_of_data(source: str) -> Keywords | None:
    """The keywords with which `spechead data synthesize` wrote the JSONL file `source`, from its .meta.json.

    None without such a record: data of other origin, hub datasets. Raises UserError if the record is not JSON.
    """
    path = Path(source + ".meta.json")
    meta = read_json(path) if path.is_file() else None
    options = meta.get("options") if isinstance(meta, dict) else None
    if not isinstance(options, dict):
        return None
    return dict(options.get("template_kwargs") or {})
