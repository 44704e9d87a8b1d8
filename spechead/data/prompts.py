"""Read the prompts of an evaluation. Knows nothing of models or of what is measured.

A row is `{"question_id": 7, "category": "coding", "turns": ["...", ...]}`; only the first turn is asked. Many
public files carry `turns` alone: then the id is the line number and the category "other".
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from spechead.errors import UserError
from spechead.files import reason


@dataclass(frozen=True)
class Prompt:
    question_id: int | str
    category: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a JSONL file; a UserError names the file and the line that is not one."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read the prompts {path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts {path} are not UTF-8 text: {error}") from error
    prompts = [_prompt(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise UserError(f"{path} holds no prompts")
    ids: dict[int | str, int] = {}
    for index, prompt in enumerate(prompts):
        if prompt.question_id in ids:
            raise UserError(f"{path}: question_id {prompt.question_id!r} is there twice")
        ids[prompt.question_id] = index
    return prompts


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts spread over the categories: the first of each, then the second, in file order."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    ranked = [p for p in chain.from_iterable(zip_longest(*groups.values())) if p is not None]
    chosen = {prompt.question_id for prompt in ranked[:count]}
    return [prompt for prompt in prompts if prompt.question_id in chosen]


def _prompt(line: str, number: int, path: Path) -> Prompt:
    where = f"{path} line {number}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise UserError(f'{where} has no prompt: expected {{"question_id": 1, "category": "...", "turns": ["..."]}}')
    return Prompt(row.get("question_id", number), str(row.get("category") or "other"), turns[0])
