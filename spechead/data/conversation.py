"""A conversation as it will be served, from a row of a dataset in any of the usual layouts.

A row that cannot be used raises `Unusable`, whose short reason is counted; nothing is guessed or left out silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spechead.data import layouts
from spechead.data.messages import UNSUPPORTED, Cleaner, Message, Unusable, decoded, is_empty, message_of, shown

COLUMNS = (*layouts.COLUMNS, "system", "tools", "chat_template_kwargs", "meta", "answer_ids", *UNSUPPORTED)
"""The columns that are looked at; all others are ignored."""


@dataclass
class Conversation:
    """Messages as transformers' `apply_chat_template` takes them, or a plain document."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    text: str = ""
    """A plain document; then there are no messages."""
    answer_ids: list[list[int]] | None = None
    """The ids the target wrote, a list an assistant turn, with the end of the turn if it was written; [] = not kept."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """The row's own chat_template_kwargs."""
    meta: dict[str, Any] = field(default_factory=dict)
    replaced: int = 0
    """Lone surrogates that became U+FFFD."""


def conversation_of(row: Any, *, answered: bool = True) -> Conversation:
    """The conversation in a row; Unusable says why there is none. `answered`: an assistant turn is required."""
    if not isinstance(row, dict):
        raise Unusable("not an object", shown(row))
    for name in UNSUPPORTED:
        if not is_empty(row.get(name)):
            raise Unusable(f"column {name} is not supported")
    cleaner = Cleaner()
    meta = cleaner.clean(object_in(row, "meta"))
    raw = layouts.messages_of(row)
    if raw is None:
        return Conversation([], text=cleaner.clean(document_in(row, answered)), meta=meta, replaced=cleaner.replaced)
    if not raw:
        raise Unusable("the conversation is empty")
    messages = with_system([message_of(message) for message in raw], row.get("system"))
    check_speakers([message["role"] for message in messages])
    answers = [message for message in messages if message["role"] == "assistant"]
    if answered:
        check_answers(answers)
    return Conversation(
        cleaner.clean(messages),
        cleaner.clean(tools_in(row)),
        answer_ids=answer_ids_in(row, len(answers)),
        keywords=cleaner.clean(object_in(row, "chat_template_kwargs", decode=True)),
        meta=meta,
        replaced=cleaner.replaced,
    )


# ------------------------------------------------------------------------------------------------ checks


def check_speakers(roles: Sequence[str]) -> None:
    """Refuse a chat that no user and no tool begins."""
    speakers = [role for role in roles if role not in ("system", "developer")]
    if not speakers:
        raise Unusable("only the system speaks")
    if speakers[0] == "assistant":
        raise Unusable("the assistant speaks first")


def check_answers(answers: Sequence[Message]) -> None:
    """Refuse a chat in which the assistant says nothing."""
    if not answers:
        raise Unusable("no assistant turn")
    for answer in answers:
        if answer["content"].strip() or answer.get("reasoning_content", "").strip() or answer.get("tool_calls"):
            return
    raise Unusable("empty answer")


# ------------------------------------------------------------------------------------------------ columns


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """The messages with the text of the column `system` first, unless they begin with it."""
    if is_empty(system) or (isinstance(system, str) and not system.strip()):
        return messages
    if not isinstance(system, str):
        raise Unusable("system is not text", shown(system))
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise Unusable("two system texts")
    return messages


def tools_in(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The column `tools`: a list of objects or a JSON string of it; None if it holds no tool."""
    tools = decoded(row.get("tools") or [], "tools that are not JSON")
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise Unusable("tools are not a list of objects", shown(tools))
    return tools or None


def object_in(row: dict[str, Any], column: str, *, decode: bool = False) -> dict[str, Any]:
    """A column that holds an object or null, or where `decode`, a JSON string of it."""
    value = row.get(column)
    if decode:
        value = decoded(value or None, f"{column} is not JSON")
    if value is not None and not isinstance(value, dict):
        raise Unusable(f"{column} is not an object", shown(value))
    return value or {}


def document_in(row: dict[str, Any], answered: bool) -> str:
    """The plain document of a row without a chat."""
    text = row.get("text")
    if text is None:
        raise Unusable("no conversation in the row", f"its columns are {shown(list(row))}")
    if not isinstance(text, str):
        raise Unusable("text is not a string", shown(text))
    if not answered:
        raise Unusable("a plain document has no prompt")
    if not text.strip():
        raise Unusable("the document is empty")
    return text


def answer_ids_in(row: dict[str, Any], turns: int) -> list[list[int]] | None:
    """The column `answer_ids`: one list of token ids an assistant turn; null stands for an empty one."""
    lists = row.get("answer_ids")
    if lists is None:
        return None
    if not isinstance(lists, list) or len(lists) != turns or not all(is_ids(ids) for ids in lists):
        raise Unusable("answer_ids do not fit the answers", f"{turns} assistant turns, {shown(lists)}")
    return [list(ids or []) for ids in lists]


def is_ids(ids: Any) -> bool:
    return ids is None or (isinstance(ids, list) and all(type(one) is int and 0 <= one < 2**31 for one in ids))
