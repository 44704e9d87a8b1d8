"""Find all answers of a long conversation in one render of it, in time linear in the number of turns.

That holds for templates that only append: the prompt of each turn is then a prefix of the render. It is checked at each
answer (the text around it is that around the first), at the first and the last prompt, and at log n prompts between
them, which are rendered whole; where a check fails, nothing is returned, and turns are rendered one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from spechead.data.answer_text import CLOSED
from spechead.target.chat_template import SENTINEL, ChatTemplate, Keywords, Message, TemplateError, Tools

Span = tuple[int, int]


def spans_in_one_render(
    chat: ChatTemplate,
    messages: Sequence[Message],
    places: Sequence[int],
    tools: Tools | None,
    keywords: Keywords,
    prompt: Callable[[int], str],
) -> tuple[list[int], list[Span]] | None:
    """The ids up to the last answer, and for the message at each of `places` its first token and the one after its
    terminator. None where the template does not merely append, or the tokenizer gives no positions.

    `prompt`: the text that the target is given before the message at a place.
    """
    terminator = chat.terminator
    if not (getattr(chat.tokenizer, "is_fast", False) and terminator):
        return None
    if any(set(messages[place]) - {"role", "content"} or not messages[place]["content"].strip() for place in places):
        return None
    if CLOSED.search(prompt(places[0])) and any("</" in messages[place]["content"] for place in places):
        return None  # a thought after a closed one
    try:
        text = chat.render(messages[: places[-1] + 1], tools, keywords=keywords)
        spans = _text_spans(chat, text, messages, places, tools, keywords, prompt(places[0]))
    except TemplateError:
        return None
    if spans is None:
        return None
    checked = {len(places) - 1} | {1 << bit for bit in range(len(places).bit_length()) if 1 << bit < len(places)}
    if any(prompt(places[turn]) != text[: spans[turn][0]] for turn in sorted(checked)):
        return None
    return _token_spans(chat, text, spans)


def _text_spans(
    chat: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    places: Sequence[int],
    tools: Tools | None,
    keywords: Keywords,
    first_prompt: str,
) -> list[Span] | None:
    """The character positions of each answer and of the end of its terminator."""
    marked = list(messages[: places[-1] + 1])
    for place in places:
        marked[place] = {**messages[place], "content": SENTINEL}
    between = chat.render(marked, tools, keywords=keywords).split(SENTINEL)
    if len(between) != len(places) + 1 or not (between[0].startswith(first_prompt) and text.startswith(first_prompt)):
        return None
    lead = between[0][len(first_prompt) :]  # a space that belongs to the answer
    opening = _opening(chat, chat.render(messages[: places[0]], tools, keywords=keywords), first_prompt) + lead
    spans, position = [], 0
    for turn, place in enumerate(places):
        position += len(between[turn])
        if not (text.startswith(between[turn], position - len(between[turn])) and between[turn].endswith(opening)):
            return None
        content = messages[place]["content"]
        printed = (content, content.strip(), content.rstrip(), content.lstrip())
        after = between[turn + 1]
        fitting = (c for c in printed if text.startswith(c, position) and text.startswith(after, position + len(c)))
        found = next(fitting, None)
        if found is None or not after.startswith(chat.terminator):
            return None
        end = position + len(found)
        spans.append((position - len(lead), end + len(chat.terminator)))
        position = end
    return spans


def _opening(chat: ChatTemplate, asked: str, prompt: str) -> str:
    """What the template writes before each answer: what it adds to the chat that was `asked`, else what follows the
    last control token of the prompt."""
    if added := prompt.removeprefix(asked) if prompt.startswith(asked) else "":
        return added
    return chat.from_last_control(prompt)


def _token_spans(chat: ChatTemplate, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]] | None:
    """The ids of the text up to the end of the last span, and the spans in tokens."""
    text = text[: spans[-1][1]]
    encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(encoded["input_ids"]), [begin for begin, _ in encoded["offset_mapping"]]
    ends = [end for _, end in encoded["offset_mapping"]]
    boundary, tokens = 0, []
    for begin, end in spans:
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        if (first and ends[first - 1] > begin) or (last < len(ids) and starts[last] != end) or starts[first] != begin:
            return None  # a token straddles the border
        # From one control token on, a text is tokenised as if it stood alone; so is the prompt while decoding.
        if chat.tokenize(text[boundary:begin]) != ids[bisect_left(starts, boundary) : first]:
            return None
        tokens.append((first, last))
        boundary = end - len(chat.end_token)
    return ids, tokens
