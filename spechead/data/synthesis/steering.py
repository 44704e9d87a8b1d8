"""How a target is led to write a user's message: the text before it in the chat template, and what ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.errors import UserError
from spechead.target.chat_template import SENTINEL, ChatTemplate, Message

ASSISTANT = "You are an AI assistant."


@dataclass
class Steering:
    """The text before a user's message in the target's chat template, and the text that ends it."""

    opening: str
    closing: str


def steering(chat: ChatTemplate, system: str, earlier: Sequence[Message] = ()) -> Steering:
    """Find the opening and the closing of a user turn in any template, by rendering a sentinel as its content.

    `earlier`: the messages before that turn, which begin with a user's.
    """
    messages = [*earlier, {"role": "user", "content": SENTINEL}]
    try:
        head = [{"role": "system", "content": system}] if system else []
        text = chat.render([*head, *messages])
    except UserError:
        if not system:
            raise
        # Templates without a system turn refuse it: its text then opens the first user turn.
        first = {**messages[0], "content": f"{system}\n\n{messages[0]['content']}"}
        text = chat.render([first, *messages[1:]])
    opening, sentinel, closing = text.partition(SENTINEL)
    if not sentinel:
        raise UserError("option target: its chat template drops the content of a user turn, use a chat model")
    return Steering(opening, closing)


def system_text(kind: str, language: str) -> str:
    """The system turn under which the user's messages of a kind are written. `language`: empty for English."""
    system = KINDS[kind].system
    if not language:
        return system
    return f"{system or ASSISTANT} The user writes every message in {language}, and you answer in {language}."


def closing_tokens(chat: ChatTemplate, closing: str) -> set[int]:
    """The control token that a closing begins with, if any."""
    first = chat.leading_control(closing.lstrip())
    return set() if first is None else {first}
