"""Whether texts that belong together were rendered with the same keywords of the chat template.

A keyword such as enable_thinking changes what stands before an answer; a head trained on one form and used on another
drafts worse, and nothing else tells. Knows nothing of how a chat is rendered.
"""

import json
from pathlib import Path
from typing import Any

from spechead.files import read_json

Keywords = dict[str, Any]


def template_warning(ours: Keywords, theirs: Keywords | None, what: str) -> str:
    """One line where the keywords differ, else nothing. `what` is the subject and verb for `theirs`, such as
    "head runs/a/head was trained"; None means that they are not known."""
    if theirs is None or ours == theirs:
        return ""
    return (
        f"{what} with template keywords {json.dumps(theirs)}, here they are {json.dumps(ours)}: "
        "where the prompts' form differs, drafts fit worse"
    )


def written_with(source: str) -> Keywords | None:
    """The keywords with which `spechead data synthesize` wrote the JSONL file `source`, as its .meta.json has them.

    None where there is no such record: texts of other origin, hub datasets. Raises UserError where it is not JSON.
    """
    path = Path(source + ".meta.json")
    meta = read_json(path) if path.is_file() else None
    options = meta.get("options") if isinstance(meta, dict) else None
    if not isinstance(options, dict):
        return None
    return dict(options.get("template_kwargs") or {})
