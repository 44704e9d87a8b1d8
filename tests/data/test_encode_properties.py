"""Any conversation, with any family's template: each answer follows the prompt that is served, none is lost unsaid."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spechead.data import encode as module
from spechead.data.answer_text import complete, opened_thought, squeezed
from spechead.data.conversation import Conversation, Unusable, conversation_of
from spechead.data.encode import Encoded, encode
from spechead.target.chat_template import SENTINEL, ChatTemplate
from tests.data.test_encode_templates import CALL, TOOLS
from tests.helpers.templates import DATE, FAMILIES, make_tokenizer

LOST = "answers that are blank, or that the chat template hides"
TEXTS = (
    *("", " ", "\n", "H", "..", "a\n\n\nb", "  é☃! ", "\u2028", "assistant", "ASSISTANT: x", "&<b>\"'", SENTINEL),
    *("<think>", "</think>", "<think>\nt\n</think>\n\na", "<|im_start|>user\nHi", "x<|im_end|>", "</s>[INST]"),
)
texts = st.sampled_from(TEXTS) | st.text("aH.\n <é", max_size=12)
thoughts = st.none() | st.none() | texts


@cache
def chat_of(family: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(family), date=DATE)


@st.composite
def rows(draw: st.DrawFn, chat: ChatTemplate) -> dict[str, Any]:
    """Up to 12 answers, mostly after questions, some after results of tools, some in no order."""
    messages: list[dict[str, Any]] = []
    for role in draw(st.lists(st.sampled_from(["system", "developer"]), max_size=1)):
        messages.append({"role": role, "content": draw(texts)})
    kinds = ["ask"] * 8 + ["call"] + draw(st.sampled_from([[], ["user", "assistant", "tool", "system"]]))
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12)):
        if kind in ("ask", "call"):
            messages.append({"role": "user", "content": draw(texts)})
        if kind == "call":
            messages.append({"role": "assistant", "content": draw(texts), "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": draw(texts)})
        spoken = {"role": "assistant" if kind in ("ask", "call") else kind, "content": draw(texts)}
        messages.append(spoken | ({"reasoning_content": draw(thoughts)} if spoken["role"] == "assistant" else {}))
    row: dict[str, Any] = {"messages": messages}
    if draw(st.booleans()):
        row["tools"] = draw(st.sampled_from([TOOLS, []]))
    if draw(st.booleans()):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        kept = {
            "letters": lambda text: [one for letter in text for one in chat.tokenize(letter)] + sorted(chat.stop_ids),
            "other": lambda text: draw(st.lists(st.integers(0, 2**31 - 1), max_size=3)),
            "none": lambda text: draw(st.sampled_from([None, []])),
        }
        row["answer_ids"] = [kept[draw(st.sampled_from(sorted(kept)))](text) for text in said]
    if draw(st.integers(0, 5)) == 0:
        row["meta"] = {"finish": "length"}
    return row


def encoded(chat: ChatTemplate, conversation: Conversation, few: int) -> tuple[list[Encoded], Counter[str]] | Unusable:
    counts: Counter[str] = Counter()
    with patch.object(module, "FEW_TURNS", few):
        try:
            return encode(chat, conversation, counts=counts), counts
        except Unusable as error:
            return error


def check(chat: ChatTemplate, row: dict[str, Any]) -> None:
    try:
        conversation = conversation_of(row)
    except Unusable:
        return
    found, one_by_one = encoded(chat, conversation, 2), encoded(chat, conversation, 10**6)
    if isinstance(found, Unusable) or isinstance(one_by_one, Unusable):
        assert isinstance(found, Unusable) and found.reason and str(found) == str(one_by_one)
        return
    assert found == one_by_one
    samples, counts = found
    messages = conversation.messages
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers: dict[tuple[int, ...], str] = {}  # by all ids before them
    for sample in samples:
        for first, end in spans(chat, conversation, sample, places):
            text = chat.tokenizer.decode(sample.ids[first:end], skip_special_tokens=False)
            answers[tuple(sample.ids[:first])] = text
    for place in places:
        prompt = chat.prompt_text(messages[:place], conversation.tools)
        text = answers.pop(tuple(chat.tokenize(prompt)), None)
        if text is None:
            counts[LOST] -= 1
            continue
        thought = opened_thought(prompt)
        assert complete(text, messages[place]) or complete(thought + text, messages[place])
        check_nothing_else(chat, row, messages[place], thought + text, last=place == places[-1])
    assert not answers and not counts[LOST]


def spans(chat: ChatTemplate, asked: Conversation, sample: Encoded, places: list[int]) -> list[tuple[int, int]]:
    """The supervised runs; two of one run where a template opens no turn between them."""
    prompts = {tuple(chat.prompt_ids(asked.messages[:place], asked.tools)) for place in places}
    edges = [0, *(i for i in range(1, len(sample.ids)) if sample.supervised[i] != sample.supervised[i - 1])]
    edges += [i for i in range(1, len(sample.ids)) if sample.supervised[i] and tuple(sample.ids[:i]) in prompts]
    edges = sorted({*edges, len(sample.ids)})
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if sample.supervised[a]]


def check_nothing_else(chat: ChatTemplate, row: dict[str, Any], message: Any, text: str, *, last: bool) -> None:
    """An answer has the end of a turn, and little besides what the message says."""
    cut, kept = last and "meta" in row, "answer_ids" in row
    assert cut or kept or any(text.endswith(str(chat.tokenizer.convert_ids_to_tokens(i))) for i in chat.stop_ids)
    said = [message["content"], message.get("reasoning_content", ""), str(message.get("tool_calls", ""))]
    form = 150 if message.get("tool_calls") else 95 if said[1] else 45  # of gpt-oss
    assert kept or len(squeezed(text)) <= sum(len(squeezed(part)) for part in said) + form


@pytest.mark.parametrize("family", FAMILIES)
def test_any_conversation_is_served_or_refused(family: str) -> None:
    chat = chat_of(family)

    @settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(rows(chat))
    def holds(row: dict[str, Any]) -> None:
        check(chat, row)

    holds()
