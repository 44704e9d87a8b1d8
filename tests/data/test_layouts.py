"""Each layout of a row gives its messages."""

from typing import Any

import pytest

from spechead.data.layouts import messages_of
from spechead.data.messages import Unusable

ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"conversations": [ASKED, SAID]},
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "response": None, "completion": "b"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "completion": "b"},
        {"prompt": [ASKED, SAID]},
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "input": None, "response": "b"},
        {"instruction": "", "input": "a", "response": "b"},
    ],
)
def test_a_question_and_its_answer(row: dict[str, Any]) -> None:
    assert messages_of(row) == [ASKED, SAID]


def test_instruction_and_input_are_joined_by_a_blank_line() -> None:
    [asked, _] = messages_of({"instruction": "Add", "input": "1, 2", "output": "3"}) or []
    assert asked == {"role": "user", "content": "Add\n\n1, 2"}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("system", "system"),
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("assistant", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("stranger", "stranger"),
        (5, 5),
        (None, None),
    ],
)
def test_roles_of_sharegpt(name: Any, role: Any) -> None:
    [message] = messages_of({"conversations": [{"from": name, "value": "a"}]}) or []
    assert (message["role"], message["content"]) == (role, "a")


@pytest.mark.parametrize("value", ['{"name": "f", "arguments": "{}"}', CALL, [CALL]])
def test_a_function_call_of_sharegpt_is_an_answer_with_a_tool_call(value: Any) -> None:
    row = {"conversations": [{"from": "function_call", "value": value}]}
    assert messages_of(row) == [{"role": "assistant", "tool_calls": [CALL]}]


def test_sharegpt_leaves_what_is_no_message_to_the_check() -> None:
    assert messages_of({"conversations": ["a", None]}) == ["a", None]


def test_turns_are_what_the_user_says() -> None:
    assert messages_of({"turns": ["a", "c"]}) == [ASKED, {"role": "user", "content": "c"}]


def test_a_prompt_alone_has_no_answer() -> None:
    assert messages_of({"prompt": "a"}) == [ASKED]


def test_the_first_layout_that_is_not_null_wins() -> None:
    row: dict[str, Any] = {"text": "x", "turns": ["t"], "instruction": "i", "prompt": "p"}
    row |= {"conversations": [{"from": "human", "value": "c"}], "messages": [{"role": "user", "content": "m"}]}
    found = []
    for column in ("messages", "conversations", "prompt", "instruction", "turns"):
        found += [message["content"] for message in messages_of(row) or []]
        row[column] = None
    assert found == ["m", "c", "p", "i", "t"] and messages_of(row) is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "Hi"}, "messages is not a list"),
        ({"conversations": {"from": ["human"]}}, "conversations is not a list"),
        ({"turns": "Hi"}, "turns is not a list"),
        ({"prompt": 5}, "prompt is neither text nor messages"),
        ({"prompt": "a", "completion": {}}, "response is neither text nor messages"),
        ({"instruction": ["a"]}, "instruction or input is not text"),
        ({"instruction": "a", "input": 1}, "instruction or input is not text"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "a function call that is not JSON"),
    ],
)
def test_each_fault_has_its_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as error:
        messages_of(row)
    assert error.value.reason == reason
