"""One message: what is kept, what is turned into the form that servers render, and each fault's reason."""

import json
import pickle
from typing import Any

import pytest

from spechead.data.messages import DEEPEST, UNSUPPORTED, Cleaner, Unusable, is_empty, message_of

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_null_and_foreign_keys_are_dropped() -> None:
    message = {"role": "user", "content": "Hi", "id": 7, "tool_calls": None, "images": None, "audio": [], "name": None}
    assert message_of(message) == {"role": "user", "content": "Hi"}


def test_odd_but_valid_text_passes() -> None:
    assert message_of({"role": "user", "content": "\0\ufeff\u202e \r\n"})["content"] == "\0\ufeff\u202e \r\n"


def test_text_parts_are_joined_by_a_line_break() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    assert message_of({"role": "user", "content": parts})["content"] == "a\nb"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name_and_may_stand_without_content(key: str) -> None:
    expected = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert message_of({"role": "assistant", "content": None, key: "hm"}) == expected


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (CALL, {}),
        ({"name": "f", "arguments": {"a": 1}}, {}),
        ({"name": "f", "arguments": '{"a": 1}', "function": None}, {}),
        ({"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}, {"id": "x"}),
    ],
)
def test_tool_calls_have_one_form_with_their_arguments_as_an_object(call: Any, number: dict[str, str]) -> None:
    assert message_of({"role": "assistant", "tool_calls": [call]})["tool_calls"] == [number | CALL]


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    [call] = message_of({"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]})["tool_calls"]
    assert call["function"]["arguments"] == {}


def test_the_answer_of_a_tool_keeps_its_names() -> None:
    message = {"role": "tool", "content": "7", "tool_call_id": "x", "name": "f"}
    assert message_of(message) == message


@pytest.mark.parametrize("role", ["system", "developer", "tool", "ipython", "function"])
def test_roles_are_left_to_the_template(role: str) -> None:
    assert message_of({"role": role, "content": "x"})["role"] == role


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Hi", "a message is not an object"),
        ({"content": "Hi"}, "a message without a role"),
        ({"role": None, "content": "Hi"}, "a message without a role"),
        ({"role": "human", "content": "Hi"}, "unknown role 'human'"),
        ({"role": ["user"], "content": "Hi"}, "a role that is not text"),
        ({"role": "user"}, "a message without content"),
        ({"role": "user", "content": None, "reasoning": "hm"}, "a message without content"),
        ({"role": "assistant", "content": None}, "a message without content"),
        ({"role": "assistant", "tool_calls": []}, "a message without content"),
        ({"role": "user", "content": 5}, "content that is not text"),
        ({"role": "user", "content": {"type": "text", "text": "a"}, "name": 1}, "name that is not text"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "content that is not text"),
        ({"role": "user", "content": ["a"]}, "content that is not text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content that is not text"),
        ({"role": "assistant", "content": "a", "thinking": ["b"]}, "reasoning_content that is not text"),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls are not a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "a tool call without a name"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "a tool call without a name"),
        ({"role": "assistant", "tool_calls": [{"name": ""}]}, "a tool call without a name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{'a': 1}"}]},
            "tool call arguments that are not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]},
            "tool call arguments that are not JSON",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "tool call arguments that are not"),
        ({"role": "user", "content": "a", "tools": [{}]}, "key tools of a message is not supported"),
        *(({"role": "user", "content": "a", key: "x"}, f"key {key} of a message is not") for key in UNSUPPORTED),
    ],
)
def test_each_fault_has_its_reason(message: Any, reason: str) -> None:
    with pytest.raises(Unusable) as error:
        message_of(message)
    assert error.value.reason.startswith(reason) and "\n" not in str(error.value)


def test_a_reason_passes_between_processes() -> None:
    error = pickle.loads(pickle.dumps(Unusable("why", "where")))
    assert (error.reason, error.detail, str(error), str(Unusable("why"))) == ("why", "where", "why: where", "why")


# ------------------------------------------------------------------------------------------------ values


def test_lone_surrogates_are_replaced_and_counted_everywhere() -> None:
    cleaner = Cleaner()
    value = json.loads(r'{"\ud800": ["a\udfffb\udfff", {"x": "\ud83d\ude00"}], "ä": 1.5}')
    assert cleaner.clean(value) == {"\ufffd": ["a\ufffdb\ufffd", {"x": "\U0001f600"}], "ä": 1.5}
    assert cleaner.replaced == 3


def test_depth_is_limited() -> None:
    assert Cleaner().clean(nested(DEEPEST)) == nested(DEEPEST)
    for depth in (DEEPEST + 1, 100_000):
        with pytest.raises(Unusable, match="nested too deeply"):
            Cleaner().clean(nested(depth))


@pytest.mark.parametrize("value", [{1: 2}, b"x", {"a": {1}}, (1,)])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(Unusable, match="a value that JSON cannot hold"):
        Cleaner().clean(value)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(text: str) -> None:
    with pytest.raises(Unusable, match="NaN or infinity"):
        Cleaner().clean(json.loads(f'[{{"a": {text}}}]'))


def test_nothing_and_something() -> None:
    nothing: list[Any] = [None, "", b"", [], {}, (), 0, False]
    something: list[Any] = ["x", [None], {"a": None}, object()]
    assert all(is_empty(value) for value in nothing) and not any(is_empty(value) for value in something)


@pytest.mark.parametrize("thought", ["", " \n", None])
def test_a_blank_thought_is_none(thought: str | None) -> None:
    said = {"role": "assistant", "content": "Yo"}
    assert message_of(said | {"reasoning_content": thought}) == said
