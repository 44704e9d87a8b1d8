"""What the target wrote, by hand-made renders; test_encode_templates.py walks the families."""

from __future__ import annotations

from typing import Any

import pytest

from spechead.data.written import complete, opened_thought, squeezed, written
from spechead.target.chat_template import ChatTemplate
from tests.data.test_encode import make_tokenizer

CHAT = ChatTemplate(make_tokenizer("chatml"))
THINKS = ChatTemplate(make_tokenizer("thinking"))  # its template names the tag
ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("rendered", "text"),
    [
        (ASKED + "Yo<|im_end|>\n", "Yo<|im_end|>"),
        ("<|im_start|>moved<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n", "Yo<|im_end|>"),
        ("", "Yo<|im_end|>"),
        ("something else", "Yo<|im_end|>"),
    ],
)
def test_the_render_is_used_where_it_has_all_of_the_answer(rendered: str, text: str) -> None:
    assert written(CHAT, ASKED, rendered, answer("Yo"), cut=False) == text
    assert written(CHAT, ASKED, rendered, answer("Yo"), cut=True) == "Yo"


def test_an_answer_that_contains_its_own_opening_is_taken_whole() -> None:
    text = "one<|im_end|>\n<|im_start|>assistant\ntwo"
    message = answer("two", reasoning_content="one")
    assert (
        written(CHAT, ASKED, f"<s><|im_start|>assistant\n{text}<|im_end|>\n", message, cut=False) == text + "<|im_end|>"
    )


def test_a_thought_after_a_closed_one_is_never_written() -> None:
    closed = ASKED + "<think>\n\n</think>\n\n"
    for message in (answer("<think>a</think>b"), answer("b", reasoning_content="a")):
        assert written(THINKS, closed, closed + "<think>a</think>b<|im_end|>\n", message, cut=False) == ""
    assert written(THINKS, closed, closed + "b<|im_end|>\n", answer("b"), cut=False) == "b<|im_end|>"


def test_an_answer_cut_within_its_thought_ends_there() -> None:
    opened = ASKED + "<think>\n"
    assert written(THINKS, opened, "", answer("so"), cut=True) == "so"
    assert written(THINKS, opened, "", answer("<think>\nso"), cut=True) == "so"
    assert written(THINKS, ASKED, ASKED + "x", answer("<think>\nso"), cut=True) == "<think>\nso"
    rendered = ASKED + "<think>so</think><|im_end|>\n"
    assert written(THINKS, ASKED, rendered, answer("", reasoning_content="so"), cut=True) == "<think>so"
    # Where the template knows no thoughts, a tag is a part of the answer.
    assert written(CHAT, ASKED, ASKED + "<div> a<|im_end|>\n", answer("<div> a"), cut=True) == "<div> a"


def test_every_call_must_be_there() -> None:
    call = {"function": {"name": "look_up", "arguments": {}}}
    message = answer("", tool_calls=[call, call])
    assert complete("look_up() look_up()", message) and not complete("look_up()", message)
    assert complete(" a\nb ", answer("ab")) and squeezed(" a\n b") == "ab"


def test_the_tag_of_an_opened_thought() -> None:
    assert opened_thought("a<think>\n") == "<think>\n" and opened_thought("a<think>b") == ""
