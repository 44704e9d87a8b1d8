"""Read the prompts of an evaluation.

A row is `{"question_id": 7, "category": "coding", "turns": ["...", ...]}`; only the first turn is used. Many
public files carry `turns` alone: then the id is the line number and the category "other".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from spechead.errors import UserError
from spechead.files import clean, read_jsonl


@dataclass(frozen=True)
class Prompt:
    question_id: int | str
    category: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a JSONL file; a UserError names the file and the first line that is not a prompt."""
    prompts: dict[int | str, Prompt] = {}
    for where, row in read_jsonl(path, "prompts"):
        prompt = _prompt(row, where)
        if prompt.question_id in prompts:
            raise UserError(f"{where}: question_id {prompt.question_id!r} is there twice")
        prompts[prompt.question_id] = prompt
    if not prompts:
        raise UserError(f"{path}: contains no prompts")
    return list(prompts.values())


def balanced(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts spread over the categories: the first of each, then the second, in file order."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    ranked = [p for p in chain.from_iterable(zip_longest(*groups.values())) if p is not None]
    chosen = {prompt.question_id for prompt in ranked[:count]}
    return [prompt for prompt in prompts if prompt.question_id in chosen]


def _prompt(row: Any, where: str) -> Prompt:
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise UserError(f'{where}: no prompt, expected {{"question_id": 1, "category": "...", "turns": ["..."]}}')
    number = row.get("question_id")
    if number is None:
        number = int(where.rpartition(" ")[2])  # the line
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise UserError(f"{where}: question_id must be a whole number or text, not {str(number)[:60]}")
    number = clean(number) if isinstance(number, str) else number
    return Prompt(number, clean(str(row.get("category") or "other")), clean(turns[0]))
