"""The layouts in which public datasets keep a chat, each turned into the list of its messages, not yet checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spechead.data.messages import Unusable, decoded, shown

Row = dict[str, Any]
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "observation": "tool",
}


def messages_of(row: Row) -> list[Any] | None:
    """The messages of the first layout whose column is not null; None where a row has none of them."""
    for column, layout in LAYOUTS.items():
        if row.get(column) is not None:
            return layout(row)
    return None


def from_messages(row: Row) -> list[Any]:
    """`{"messages": [{"role": ..., "content": ...}, ...]}`"""
    return list_in(row, "messages")


def from_sharegpt(row: Row) -> list[Any]:
    """`{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}`, or role and content."""
    return [sharegpt_message(message) for message in list_in(row, "conversations")]


def sharegpt_message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    role, content = first(message, "from", "role"), first(message, "value", "content")
    if role == "function_call":
        calls = decoded(content, "a function call that is not JSON")
        return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {**message, "role": role, "content": content}


def from_prompt(row: Row) -> list[Any]:
    """`{"prompt": ..., "response": ...}` or `completion`; each a string or, as TRL has them, a list of messages."""
    return [*spoken(row, "user", "prompt"), *spoken(row, "assistant", "response", "completion")]


def from_instruction(row: Row) -> list[Any]:
    """`{"instruction": ..., "input": ..., "output": ...}` as of Alpaca, or `response`."""
    texts = [row["instruction"], first(row, "input")]
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise Unusable("instruction or input is not text", shown(text))
    question = "\n\n".join(text for text in texts if text and text.strip())
    return [{"role": "user", "content": question}, *spoken(row, "assistant", "output", "response")]


def from_turns(row: Row) -> list[Any]:
    """`{"turns": [...]}`: what a user says, turn by turn, without answers."""
    return [{"role": "user", "content": turn} for turn in list_in(row, "turns")]


LAYOUTS: dict[str, Callable[[Row], list[Any]]] = {
    "messages": from_messages,
    "conversations": from_sharegpt,
    "prompt": from_prompt,
    "instruction": from_instruction,
    "turns": from_turns,
}

COLUMNS = (*LAYOUTS, "response", "completion", "input", "output", "text")
"""The columns that a layout may read."""


# ------------------------------------------------------------------------------------------------ parts


def list_in(row: Row, column: str) -> list[Any]:
    if not isinstance(row[column], list):
        raise Unusable(f"{column} is not a list", shown(row[column]))
    return row[column]


def spoken(row: Row, role: str, *columns: str) -> list[Any]:
    """The messages in the first of `columns` that is not null; a string is one message of `role`."""
    said = first(row, *columns)
    if said is None or isinstance(said, list):
        return said or []
    if not isinstance(said, str):
        raise Unusable(f"{columns[0]} is neither text nor messages", shown(said))
    return [{"role": role, "content": said}]


def first(row: Row, *names: str) -> Any:
    """The first value under these names that is not null, or None."""
    return next((row[name] for name in names if row.get(name) is not None), None)
