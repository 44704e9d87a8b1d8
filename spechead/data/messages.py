"""One message of a chat in the form that chat templates take: what servers do to a request before they render it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from spechead.errors import UserError
from spechead.files import SURROGATE

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool", "developer", "ipython", "function")
REASONING = ("reasoning_content", "reasoning", "thinking")
UNSUPPORTED = ("documents", "images", "image", "videos", "audio", "audios", "functions", "function_call")
"""Columns of a row, and keys of a message, that would change the prompt in ways that are not rendered here."""
DEEPEST = 100
"""Levels of nesting in what is kept of a row: far above any real one, far below Python's own limit."""


class Unusable(UserError):
    """A row that cannot be used. `reason` is short and counted over rows; `detail` is of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)  # both, so that it passes between processes unchanged
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def message_of(message: Any) -> Message:
    """A message with `content` as a string, and where given `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.

    Other keys are dropped, as servers drop them; keys that are null count as absent.
    """
    if not isinstance(message, dict):
        raise Unusable("a message is not an object", shown(message))
    given = {key: value for key, value in message.items() if value is not None}
    if "role" not in given:
        raise Unusable("a message without a role")
    role = given["role"]
    if not isinstance(role, str):
        raise Unusable("a role that is not text", shown(role))
    if role not in ROLES:
        raise Unusable(f"unknown role {shown(role, 30)}", f"use {', '.join(ROLES)}")
    for key in (*UNSUPPORTED, "tools"):
        if not is_empty(given.get(key)):
            raise Unusable(f"key {key} of a message is not supported")
    reasoning = next((given[key] for key in REASONING if key in given), None)
    calls = tool_calls_of(given.get("tool_calls", []))
    if "content" not in given and not (role == "assistant" and (calls or reasoning)):
        raise Unusable("a message without content")
    result: Message = {"role": role, "content": text_of(given.get("content", ""))}
    texts = {"reasoning_content": reasoning, "tool_call_id": given.get("tool_call_id"), "name": given.get("name")}
    for key, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise Unusable(f"{key} that is not text", shown(text))
    if not (reasoning or "").strip():
        texts["reasoning_content"] = None  # a template may print an empty one, which the target does not write
    result |= {key: text for key, text in texts.items() if text is not None}
    if calls:
        result["tool_calls"] = calls
    return result


def text_of(content: Any) -> str:
    """The content of a message: a string, or text parts, which vLLM joins by a line break."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise Unusable("content that is not text", shown(part))
    return "\n".join(part["text"] for part in parts)


def tool_calls_of(calls: Any) -> list[dict[str, Any]]:
    """Tool calls in the form of OpenAI's API, from that form or from bare `{"name": ..., "arguments": ...}`."""
    if not isinstance(calls, list):
        raise Unusable("tool_calls are not a list", shown(calls))
    return [tool_call_of(call) for call in calls]


def tool_call_of(call: Any) -> dict[str, Any]:
    """One tool call; `arguments` becomes an object, since servers parse it before they render."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Unusable("a tool call without a name", shown(call))
    arguments = decoded(function.get("arguments") or {}, "tool call arguments that are not JSON")
    if not isinstance(arguments, dict):
        raise Unusable("tool call arguments that are not an object", shown(arguments))
    number = {"id": call["id"]} if call.get("id") is not None else {}
    return {**number, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


# ------------------------------------------------------------------------------------------------ values


def decoded(value: Any, reason: str) -> Any:
    """The value of a string of JSON, or Unusable with this reason; anything but a string as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unusable(reason, shown(value)) from error


def is_empty(value: Any) -> bool:
    """Whether a column or key holds nothing; a value of a foreign type is something."""
    return value is None or (isinstance(value, str | bytes | list | tuple | dict | int | float) and not value)


def shown(value: Any, length: int = 60) -> str:
    """The beginning of a value, on one line, for an error."""
    try:
        return repr(value)[:length]
    except RecursionError:
        return "a deeply nested value"


@dataclass
class Cleaner:
    """Copies JSON values with lone surrogates replaced, which no tokenizer takes and no UTF-8 file holds."""

    replaced: int = 0

    def clean(self, value: Any, depth: int = 0) -> Any:
        """The copy; Unusable for what a JSON file cannot hold, and for nesting deeper than DEEPEST."""
        if isinstance(value, str):
            return self.clean_text(value)
        if isinstance(value, dict | list) and depth >= DEEPEST:
            raise Unusable("nested too deeply")
        if isinstance(value, list):
            return [self.clean(one, depth + 1) for one in value]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {self.clean_text(key): self.clean(one, depth + 1) for key, one in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            raise Unusable("NaN or infinity", str(value))
        if value is None or isinstance(value, int | float):
            return value
        raise Unusable("a value that JSON cannot hold", shown(value))

    def clean_text(self, text: str) -> str:
        if text.isascii():
            return text
        text, count = SURROGATE.subn("\ufffd", text)
        self.replaced += count
        return text
