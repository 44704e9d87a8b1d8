"""The text that the target wrote in its turn, from the message and the chat template's render of it.

Templates trim an answer, put a space before it, or print its thought in their own form. What they print is what was
written, as long as it is all there; where they leave out a part, such as a thought, the text is composed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from spechead.target.chat_template import SENTINEL, ChatTemplate, Keywords, Message, TemplateError, Tools

OPENED = re.compile(r"<([\w:]+)>\s*\Z")  # the prompt opens a thought
CLOSED = re.compile(r"</([\w:]+)>\s*\Z")  # the prompt holds an empty one
LEADING = re.compile(r"\A\s*<([\w:]+)>\s*")


def answer_text(chat: ChatTemplate, prompt: str, turns: Iterable[str], message: Message, *, cut: bool) -> str:
    """What the target wrote after `prompt`, the end of its turn included; empty where that cannot be determined.

    `turns`: as `turns_in` gives them. `cut`: the length cap ended the answer, so that it has no terminator.
    """
    closed = CLOSED.search(prompt)
    if closed and (message.get("reasoning_content") or f"</{closed[1]}>" in message["content"]):
        return ""  # after a closed thought the target does not think again
    inside = _cut_thought(chat, prompt, message) if cut else ""
    if inside and not message.get("reasoning_content"):
        return _without_opening(prompt, inside)
    texts = (_to_the_end(chat, text, cut) for text in turns)
    text = next((text for text in texts if complete(text, message)), None)
    if text is None:
        text = _composed(chat, prompt, message, cut)
    return text[: text.rfind(inside) + len(inside)] if inside else text


def turns_in(
    chat: ChatTemplate, messages: Sequence[Message], tools: Tools | None, keywords: Keywords, prompt: str
) -> Iterator[str]:
    """What the template writes after `prompt` for the last of `messages`: what follows in a render of them; where that
    writes earlier turns otherwise, what follows in the render after the message before."""
    try:  # some templates want a chat to end with the user
        rendered = chat.render(messages, tools, keywords=keywords)
        if rendered.startswith(prompt):
            yield rendered[len(prompt) :]
        if len(messages) > 1:
            marked = [*messages[:-2], {**messages[-2], "content": SENTINEL}]
            asked = chat.prompt_text(marked, tools, keywords).rpartition(SENTINEL)
            answered = chat.render([*marked, messages[-1]], tools, keywords=keywords).rpartition(SENTINEL)
            if asked[1] and answered[1] and answered[2].startswith(asked[2]):
                yield answered[2][len(asked[2]) :]
    except TemplateError:
        return


def opened_thought(prompt: str) -> str:
    """The tag of a thought that the prompt opens; empty if it opens none."""
    opened = OPENED.search(prompt)
    return opened[0] if opened else ""


def complete(text: str, message: Message) -> bool:
    """Whether a text contains all that the message says, blanks apart."""
    printed = squeezed(text)
    names = Counter(squeezed(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or ())
    parts = [message["content"], message.get("reasoning_content") or ""]
    return all(squeezed(part) in printed for part in parts) and all(
        printed.count(name) >= number for name, number in names.items()
    )


def squeezed(text: str) -> str:
    """The text without blanks and line breaks, which templates trim and add."""
    return "".join(text.split())


def _to_the_end(chat: ChatTemplate, text: str, cut: bool) -> str:
    """A turn that was rendered as the last of a chat, up to its terminator; before it where the answer was `cut`."""
    if text.endswith(chat.ending):
        content = text.removesuffix(chat.ending)
        return content if cut else content + chat.terminator
    text = text.rstrip()
    token = chat.trailing_control(text)  # a tool call may end with another one
    return text.removesuffix(str(chat.tokenizer.convert_ids_to_tokens(token))) if cut and token is not None else text


def _composed(chat: ChatTemplate, prompt: str, message: Message, cut: bool) -> str:
    """Thought and content in the usual form, where the template cuts thoughts even from the last turn."""
    content, thought = message["content"], message.get("reasoning_content") or ""
    opened = OPENED.search(prompt)
    tag = opened[1] if opened else "think"
    if message.get("tool_calls") or (thought and not opened and f"</{tag}>" not in chat.source):
        return ""
    if thought:
        content = ("" if opened else f"<{tag}>\n") + f"{thought}\n</{tag}>\n\n{content}"
    elif opened:
        content = _without_opening(prompt, content)
        if f"</{tag}>" not in content:
            return ""  # the thought is missing with which the target would begin
    return content if cut else content + chat.terminator


def _cut_thought(chat: ChatTemplate, prompt: str, message: Message) -> str:
    """The thought within which the length cap ended the answer; empty if it came later."""
    content, thought = message["content"], message.get("reasoning_content") or ""
    if message.get("tool_calls") or (thought and content.strip()):
        return ""
    if thought:
        return thought
    opened, leading = OPENED.search(prompt), LEADING.search(content)
    tag = opened[1] if opened else leading[1] if leading else ""
    known = opened or f"</{tag}>" in chat.source  # other tags are what the answer is about
    return content if tag and known and f"</{tag}>" not in content else ""


def _without_opening(prompt: str, content: str) -> str:
    """The content without the tag that the prompt has already written."""
    opened, leading = OPENED.search(prompt), LEADING.search(content)
    return content[leading.end() :] if opened and leading and leading[1] == opened[1] else content
