"""What the target wrote, by hand-made renders; test_encode_templates.py walks the families."""

from __future__ import annotations

from typing import Any

import pytest

from spechead.data.answer_text import answer_text, complete, opened_thought, squeezed, turns_in
from spechead.target.chat_template import ChatTemplate
from tests.data.test_encode import ASSISTANT, TURN, make_tokenizer

CHAT = ChatTemplate(make_tokenizer("chatml"))
THINKS = ChatTemplate(make_tokenizer("thinking"))  # its template names the tag
ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_a_turn_that_has_all_of_the_answer_is_used() -> None:
    turns = ["other<|im_end|>\n", "[Yo]<|im_end|>\n", "Yo!<|im_end|>\n"]
    assert answer_text(CHAT, ASKED, turns, answer("Yo"), cut=False) == "[Yo]<|im_end|>"
    assert answer_text(CHAT, ASKED, turns, answer("Yo"), cut=True) == "[Yo]"


@pytest.mark.parametrize("turns", [[], ["other<|im_end|>\n"]])
def test_without_one_the_answer_is_composed(turns: list[str]) -> None:
    assert answer_text(CHAT, ASKED, turns, answer("Yo"), cut=False) == "Yo<|im_end|>"
    assert answer_text(CHAT, ASKED, turns, answer("Yo"), cut=True) == "Yo"


def turns(template: str, *messages: dict[str, Any]) -> list[str]:
    chat = ChatTemplate(make_tokenizer(template))
    asked = list(messages[:-1])
    return list(turns_in(chat, messages, None, {}, chat.prompt_text(asked)))


def test_the_turn_is_what_follows_the_prompt() -> None:
    assert turns("chatml", user("Hi"), answer("Yo"))[0] == "Yo<|im_end|>\n"


def test_where_earlier_turns_are_rewritten_it_follows_the_message_before() -> None:
    early = "{{ messages | length }}{% for m in messages %}" + TURN + "{% endfor %}" + ASSISTANT
    [turn] = turns(early, user("a"), answer("So?<|im_end|>\n<|im_start|>assistant\n"), user("b"), answer("bab"))
    assert turn == "bab<|im_end|>\n"


def test_an_opening_within_the_turn_belongs_to_it() -> None:
    channels = (
        "{{ messages | length }}{% for m in messages %}{% if m.reasoning_content %}"
        "<|im_start|>assistant\n{{ m.reasoning_content }}<|im_end|>\n{% endif %}" + TURN + "{% endfor %}" + ASSISTANT
    )
    [turn] = turns(channels, user("a"), answer("not a", reasoning_content="a"))
    assert turn == "a<|im_end|>\n<|im_start|>assistant\nnot a<|im_end|>\n"


MERGED = (
    "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}<|im_start|>{{ m.role }}\n{% endif %}"
    "{{ m.content }}{% if loop.last or loop.nextitem.role != m.role %}<|im_end|>\n{% endif %}{% endfor %}" + ASSISTANT
)


USER_ENDS = "{% if messages[-1].role != 'user' %}{{ raise_exception('a user ends') }}{% endif %}"


def test_a_turn_that_cannot_be_told_from_those_before_is_not_given() -> None:
    assert turns(MERGED, user("a"), answer("b"), answer("c")) == []
    assert turns("{{ messages | length }}{{ messages[-1].content | upper }}" + ASSISTANT, user("a"), answer("b")) == []
    assert turns(USER_ENDS + ASSISTANT, user("a"), answer("b")) == []


def test_a_thought_after_a_closed_one_is_never_written() -> None:
    closed = ASKED + "<think>\n\n</think>\n\n"
    for message in (answer("<think>a</think>b"), answer("b", reasoning_content="a")):
        assert answer_text(THINKS, closed, ["<think>a</think>b<|im_end|>\n"], message, cut=False) == ""
    assert answer_text(THINKS, closed, ["b<|im_end|>\n"], answer("b"), cut=False) == "b<|im_end|>"


def test_an_answer_cut_within_its_thought_ends_there() -> None:
    opened = ASKED + "<think>\n"
    assert answer_text(THINKS, opened, [], answer("so"), cut=True) == "so"
    assert answer_text(THINKS, opened, [], answer("<think>\nso"), cut=True) == "so"
    assert answer_text(THINKS, ASKED, ["x"], answer("<think>\nso"), cut=True) == "<think>\nso"
    assert (
        answer_text(THINKS, ASKED, ["<think>so</think><|im_end|>\n"], answer("", reasoning_content="so"), cut=True)
        == "<think>so"
    )
    # Where the template knows no thoughts, a tag is a part of the answer.
    assert answer_text(CHAT, ASKED, ["<div> a<|im_end|>\n"], answer("<div> a"), cut=True) == "<div> a"


def test_every_call_must_be_there() -> None:
    call = {"function": {"name": "look_up", "arguments": {}}}
    message = answer("", tool_calls=[call, call])
    assert complete("look_up() look_up()", message) and not complete("look_up()", message)
    assert complete(" a\nb ", answer("ab")) and squeezed(" a\n b") == "ab"


def test_the_tag_of_an_opened_thought() -> None:
    assert opened_thought("a<think>\n") == "<think>\n" and opened_thought("a<think>b") == ""
