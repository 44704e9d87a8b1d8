"""The chat template of a target: messages to the text and the token ids that a server sends to the model.

The keywords of a template, such as enable_thinking, and the date that some print change the text before an answer. A
head trained with some and served with others drafts worse without any other sign, so that they are recorded.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from jinja2.exceptions import TemplateError as JinjaError

from spechead.errors import UserError
from spechead.files import reason, shipped

SENTINEL = "spechead7sentinel"
Message = dict[str, Any]
Tools = list[dict[str, Any]]
Keywords = dict[str, Any]

_TODAY = re.compile(r"""strftime_now\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")
_CALL = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


class TemplateError(UserError):
    """A chat template that refuses a chat, or in which an assistant turn cannot be located."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A tokenizer, its chat template, and what the template is given besides the messages."""

    tokenizer: Any
    text: str = ""  # a Jinja template, or the name of one of the tokenizer's; empty: the tokenizer's default
    keywords: Keywords = field(default_factory=dict)
    date: str = ""  # YYYY-MM-DD, what templates print as today; empty: the day of the call

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        generate: bool = False,
        keywords: Keywords | None = None,
    ) -> str:
        """The chat as text; `generate`: with the opening of an assistant turn at its end.

        `keywords`: added to those of the template. Raises TemplateError where the template refuses the chat.
        """
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": generate, "tools": tools or None}
        keywords = self.keywords | (keywords or {})
        try:
            options["chat_template"] = self._source(bool(tools))
            try:
                text = self.tokenizer.apply_chat_template(list(messages), **options, **keywords)
            except TypeError:
                if not any(message.get("tool_calls") for message in messages):
                    raise
                # Some templates join the arguments of a call as text, most print the object.
                text = self.tokenizer.apply_chat_template(list(map(_with_texts, messages)), **options, **keywords)
        except (
            ArithmeticError,
            AttributeError,
            JinjaError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            why = " ".join(str(error).split())
            raise TemplateError(f"the chat template of {self.name} refuses a chat: {why}") from error
        return str(text)

    def prompt_text(
        self, messages: Sequence[Message], tools: Tools | None = None, keywords: Keywords | None = None
    ) -> str:
        """The chat up to the assistant's answer, also for templates that ignore add_generation_prompt."""
        return self.render(messages, tools, generate=True, keywords=keywords) + self._opening

    def prompt_ids(
        self, messages: Sequence[Message], tools: Tools | None = None, keywords: Keywords | None = None
    ) -> list[int]:
        """Token ids of the chat up to the assistant's answer."""
        return self.tokenize(self.prompt_text(messages, tools, keywords))

    def ignores_tools(
        self, messages: Sequence[Message], tools: Tools | None, keywords: Keywords | None, prompt: str
    ) -> bool:
        """Whether the tools leave no trace in `prompt`, the chat's own."""
        return bool(tools) and prompt == self.prompt_text(messages, None, keywords)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a rendered text; the template has already added the tokens that begin a sequence."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def name(self) -> str:
        """The tokenizer's name and the beginning of its template, for messages."""
        try:
            start = repr(" ".join(self._source(tools=False).split())[:40]) + "..."
        except (AttributeError, ValueError):
            start = "it has none; give one as option chat_template"
        return f"{getattr(self.tokenizer, 'name_or_path', '') or 'the tokenizer'} ({start})"

    # -------------------------------------------------------------------------------------------- turns

    @cached_property
    def ending(self) -> str:
        """The text after the content of an assistant's turn that is the last, such as `<|im_end|>` and a line break."""
        answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SENTINEL}]
        _, sentinel, after = self.render(answered).rpartition(SENTINEL)
        if not sentinel:
            raise TemplateError(f"the chat template of {self.name} hides where an assistant turn begins or ends")
        return after

    @cached_property
    def end_token(self) -> str:
        """The control token that ends an assistant's turn, as text; empty if none does."""
        found = [(self.ending.index(token), -len(token), token) for token in self.control if token in self.ending]
        return min(found, default=(0, 0, ""))[2]

    @cached_property
    def terminator(self) -> str:
        """What follows the content of an assistant's turn up to the control token that ends it; empty if none does."""
        return self.ending[: self.ending.index(self.end_token) + len(self.end_token)] if self.end_token else ""

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The control tokens with which the template ends an assistant's turn, of text or of a tool call."""
        found = set()
        if not self._texts:
            return frozenset()  # a tokenizer without a template, or no tokenizer
        try:
            found.add(self.control.get(self.end_token))
            called: list[Message] = [{"role": "user", "content": "Hi"}]
            called.append({"role": "assistant", "content": "", "tool_calls": [_CALL]})
            text = self.render(called, [_TOOL])
            found |= set() if text.endswith(self.ending) else {self.trailing_control(text)}
        except UserError:
            pass  # a template that refuses such a chat, or tools
        return frozenset(token for token in found if token is not None)

    @cached_property
    def control(self) -> dict[str, int]:
        """Control tokens by their text."""
        ids = set(self.tokenizer.all_special_ids) | set(self.tokenizer.get_added_vocab().values())
        texts = {str(self.tokenizer.convert_ids_to_tokens(token)): token for token in ids}
        return {text: token for text, token in texts.items() if text}

    def from_last_control(self, text: str) -> str:
        """The text from its last control token on; all of it where it has none."""
        return text[max([0, *(text.rfind(token) for token in self.control)]) :]

    def leading_control(self, text: str) -> int | None:
        """The id of the control token that a text begins with, or None."""
        found = max((token for token in self.control if text.startswith(token)), key=len, default="")
        return self.control.get(found)

    def trailing_control(self, text: str) -> int | None:
        """The id of the control token that a text ends with, apart from blanks after it, or None."""
        text = text.rstrip()
        found = max((token for token in self.control if text.endswith(token)), key=len, default="")
        return self.control.get(found)

    # -------------------------------------------------------------------------------------------- identity

    @cached_property
    def prints_date(self) -> bool:
        """Whether the template prints the day on which it is rendered."""
        return any(_TODAY.search(text) for text in self._texts)

    @property
    def source(self) -> str:
        """The text of the template, with that for tools where it is another one; empty without a template."""
        return "\n".join(dict.fromkeys(self._texts))

    def record(self) -> dict[str, Any]:
        """What a run records of it: the same values give the same text."""
        shown = self._date.isoformat() if self.prints_date else ""
        return {"template_kwargs": self.keywords, "chat_template": self.text, "template_date": shown}

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identifies the tokenizer: equal ones give the same ids for a text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        state = backend.to_str() if backend is not None else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.sha256(f"{type(self.tokenizer).__name__}{state}".encode("utf-8", "replace")).hexdigest()[:16]

    @cached_property
    def digest(self) -> str:
        """Identifies tokenizer, template, keywords and, where the template prints it, the date."""
        parts = [self.tokenizer_digest, self._texts, self.keywords, self.record()["template_date"]]
        parts.append({name: str(token) for name, token in self.tokenizer.special_tokens_map.items()})
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def _date(self) -> datetime.date:
        return datetime.date.fromisoformat(self.date) if self.date else datetime.date.today()

    @cached_property
    def _texts(self) -> list[str]:
        """The templates in use: without tools and with them."""
        try:
            return [self.tokenizer.get_chat_template(self.text or None, tools) for tools in (None, [_TOOL])]
        except (AttributeError, ValueError):
            return []

    def _source(self, tools: bool) -> str:
        """The template for chats with or without tools, its calls for today's date replaced by the date."""
        texts = self._texts or [self.tokenizer.get_chat_template(self.text or None)]  # the latter raises, with a reason
        if not self.prints_date:
            return texts[tools]
        return _TODAY.sub(lambda found: repr(self._date.strftime(found[1] or found[2] or "")), texts[tools])

    @cached_property
    def _opening(self) -> str:
        """What opens an assistant's turn in a template that ignores add_generation_prompt; empty in all others."""
        asked = [{"role": "user", "content": "Hi"}]
        plain = self.render(asked)
        if self.render(asked, generate=True) != plain:
            return ""
        before, sentinel, _ = self.render([*asked, {"role": "assistant", "content": SENTINEL}]).partition(SENTINEL)
        if not sentinel or not before.startswith(plain):
            raise TemplateError(f"the chat template of {self.name} hides where an assistant turn begins or ends")
        # A space before the answer belongs to the answer's first token, not to the prompt.
        return before[len(plain) :] if before[len(plain) :].strip() else ""


def _with_texts(message: Message) -> Message:
    """The message with the arguments of its tool calls as JSON text."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [as_text(call) for call in calls]} if calls else message


def read_template(value: str, tokenizer: Any) -> str:
    """The option chat_template as `ChatTemplate.text`: the contents of a file (or of one that ships with spechead, as
    shipped:PATH), a template as it is, or the name of one of the tokenizer's. Raises UserError for anything else."""
    named = tokenizer.chat_template if isinstance(getattr(tokenizer, "chat_template", None), dict) else {}
    if not value or value in named:
        return value
    if "{{" in value or "{%" in value:
        return _parsed(value)
    path = shipped(value.removeprefix("shipped:")) if value.startswith("shipped:") else Path(value)
    if path.is_file():
        try:
            return _parsed(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"option chat_template: cannot read {value}: {why}") from error
    names = f"; the target's own are {', '.join(named)}" if named else ""
    raise UserError(f"option chat_template: {value[:60]!r} is neither a file nor a Jinja template{names}")


def _parsed(text: str) -> str:
    """The template, if it is one; UserError with the line of a mistake."""
    marks = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # of what the assistant writes, a tag of transformers alone
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(marks.sub("", text))
    except TemplateSyntaxError as error:
        raise UserError(f"option chat_template: line {error.lineno} of the template: {error.message}") from error
    return text


def check_date(value: str) -> None:
    """Raise UserError unless the option template_date is empty or a date."""
    try:
        datetime.date.fromisoformat(value or "2000-01-01")
    except ValueError:
        raise UserError(f"option template_date: must be a date as YYYY-MM-DD, got {value!r}") from None


def prompt_ids(tokenizer: Any, messages: Sequence[Message], template_kwargs: Keywords | None = None) -> list[int]:
    """Token ids of a chat up to the assistant's answer, with the tokenizer's own chat template."""
    return ChatTemplate(tokenizer, keywords=dict(template_kwargs or {})).prompt_ids(messages)
