"""Rows to conversations: the columns beside the messages, each fault's reason, and that no row raises anything else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.data.conversation import COLUMNS, Conversation, conversation_of
from spechead.data.messages import ROLES, UNSUPPORTED, Unusable

ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(*messages: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [*messages] or [ASKED, SAID], **columns}


def test_a_row_with_every_column() -> None:
    row = chat(
        system="s",
        tools=[TOOL],
        chat_template_kwargs={"enable_thinking": False},
        answer_ids=[[1, 2]],
        meta={"finish": "length"},
        source="x",
        score=float("nan"),
    )
    assert conversation_of(row) == Conversation(
        [SYSTEM, ASKED, SAID], [TOOL], "", [[1, 2]], {"enable_thinking": False}, {"finish": "length"}
    )


def test_columns_that_are_null_or_empty_are_absent() -> None:
    columns = dict.fromkeys(("system", "tools", "chat_template_kwargs", "answer_ids", "meta", *UNSUPPORTED))
    assert conversation_of(chat(**columns)) == Conversation([ASKED, SAID])
    empty: list[Any] = ["", [], {}]
    for nothing in empty:
        assert conversation_of(chat(**dict.fromkeys(UNSUPPORTED, nothing))) == Conversation([ASKED, SAID])
    assert conversation_of(chat(system=" ", tools="[]", chat_template_kwargs="")) == Conversation([ASKED, SAID])


def test_tools_and_keywords_may_be_strings_of_json() -> None:
    found = conversation_of(chat(tools=json.dumps([TOOL]), chat_template_kwargs='{"a": 1}'))
    assert (found.tools, found.keywords) == ([TOOL], {"a": 1})


def test_the_system_column_is_put_first_once() -> None:
    for row in (chat(system="s"), chat(SYSTEM, ASKED, SAID), chat(SYSTEM, ASKED, SAID, system="s")):
        assert conversation_of(row).messages == [SYSTEM, ASKED, SAID]
    developer = {"role": "developer", "content": "s"}
    assert conversation_of(chat(developer, ASKED, SAID, system="s")).messages == [developer, ASKED, SAID]


def test_a_plain_document() -> None:
    assert conversation_of({"text": "Once", "meta": {"a": 1}}) == Conversation([], text="Once", meta={"a": 1})


def test_ids_are_one_list_an_answer() -> None:
    row = chat(ASKED, SAID, ASKED, SAID, answer_ids=[None, [5]])
    assert conversation_of(row).answer_ids == [[], [5]]


def test_prompts_need_no_answer() -> None:
    for row in (chat(ASKED), {"prompt": "a"}, {"turns": ["a"]}, {"instruction": "a"}):
        assert conversation_of(row, answered=False).messages == [ASKED]
        with pytest.raises(Unusable, match="no assistant turn"):
            conversation_of(row)


@pytest.mark.parametrize("answer", [{"reasoning": "hm"}, {"tool_calls": [{"name": "f"}]}])
def test_an_answer_may_be_reasoning_or_calls_alone(answer: dict[str, Any]) -> None:
    assert conversation_of(chat(ASKED, {"role": "assistant", **answer})).messages[1]["content"] == ""


def test_lone_surrogates_are_counted_in_all_that_is_kept() -> None:
    row = json.loads(
        r'{"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "tool_calls": [{"name": "f\udfff",'
        r' "arguments": "{\"a\": \"\\ud83d\"}"}]}], "tools": [{"\udfff": 1}], "system": "\udfff",'
        r' "meta": {"a": "\udfff"}, "chat_template_kwargs": {"a": "\udfff"}, "source": "\udfff"}'
    )
    found = conversation_of(row)
    assert found.replaced == 7 and found.meta == {"a": "\ufffd"}
    json.dumps([found.messages, found.tools, found.keywords, found.meta], ensure_ascii=False).encode()
    assert conversation_of({"text": "a\ud800"}) == Conversation([], text="a\ufffd", replaced=1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "not an object"),
        ([ASKED, SAID], "not an object"),
        ({}, "no conversation in the row"),
        ({"message": [ASKED, SAID], "text": None}, "no conversation in the row"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": [], "system": "s"}, "the conversation is empty"),
        ({"turns": []}, "the conversation is empty"),
        (chat(SYSTEM), "only the system speaks"),
        (chat(SYSTEM, {"role": "developer", "content": "d"}), "only the system speaks"),
        (chat(SAID), "the assistant speaks first"),
        (chat(SYSTEM, SAID, ASKED), "the assistant speaks first"),
        (chat(ASKED, SYSTEM), "no assistant turn"),
        (chat(ASKED, {"role": "assistant", "content": " \n"}), "empty answer"),
        ({"prompt": "a", "response": ""}, "empty answer"),
        (chat(SYSTEM, ASKED, SAID, system="t"), "two system texts"),
        (chat(system=5), "system is not text"),
        (chat(tools="f()"), "tools that are not JSON"),
        (chat(tools=5), "tools are not a list of objects"),
        (chat(tools={"f": 1}), "tools are not a list of objects"),
        (chat(tools="[1]"), "tools are not a list of objects"),
        (chat(chat_template_kwargs="a=1"), "chat_template_kwargs is not JSON"),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs is not an object"),
        (chat(meta=5), "meta is not an object"),
        (chat(meta='{"a": 1}'), "meta is not an object"),
        (chat(meta={"a": float("nan")}), "NaN or infinity"),
        (chat(answer_ids=[1, 2]), "answer_ids do not fit the answers"),
        (chat(answer_ids=[[1], [2]]), "answer_ids do not fit the answers"),
        (chat(answer_ids=[[-1]]), "answer_ids do not fit the answers"),
        (chat(answer_ids=[[True]]), "answer_ids do not fit the answers"),
        (chat(answer_ids=[[2**31]]), "answer_ids do not fit the answers"),
        (chat(answer_ids="12"), "answer_ids do not fit the answers"),
        ({"text": 5}, "text is not a string"),
        ({"text": " "}, "the document is empty"),
        *((chat(**{name: ["x"]}), f"column {name} is not supported") for name in UNSUPPORTED),
    ],
)
def test_each_fault_has_its_reason(row: Any, reason: str) -> None:
    with pytest.raises(Unusable) as error:
        conversation_of(row)
    assert error.value.reason == reason and len(str(error.value).splitlines()) == 1


def test_a_document_is_no_prompt() -> None:
    with pytest.raises(Unusable, match="a plain document has no prompt"):
        conversation_of({"text": "Once"}, answered=False)


# ------------------------------------------------------------------------------------------------ any row

texts = st.sampled_from(["", "a", "\ud800", "[]", "{}", "[{}]", "{", *ROLES, "human", "gpt", "function_call", "text"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.text(max_size=5)
keys = st.sampled_from([*COLUMNS, "role", "content", "from", "value", "type", "name", "arguments", "function"])
keys |= st.sampled_from(["tool_calls", "tool_call_id", "reasoning", "thinking", "finish"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
calls = st.lists(values | st.fixed_dictionaries({"name": texts, "arguments": values}), max_size=2)
extras = {"tool_calls": calls, "reasoning": texts, "name": scalars}
said = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2) | scalars
asked = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": said})
answer = st.fixed_dictionaries({"role": st.just("assistant"), "content": said}, optional=extras)
sharegpt = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "function_call"]), "value": texts})
messages = st.tuples(asked, answer).map(list) | st.lists(asked | answer | sharegpt | values, max_size=3)
chats = {"messages": messages, "conversations": messages, "prompt": messages | texts, "text": texts}
beside = {
    "system": texts,
    "tools": st.lists(values, max_size=1) | texts,
    "meta": st.dictionaries(keys, scalars, max_size=2),
    "chat_template_kwargs": st.dictionaries(keys, scalars, max_size=2) | texts,
    "answer_ids": st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
}
rows = values | st.dictionaries(st.sampled_from(COLUMNS), values, max_size=4)
for column, strategy in chats.items():
    rows |= st.fixed_dictionaries({column: strategy}, optional=beside | {"response": texts})


@settings(max_examples=300, deadline=None)
@given(rows, st.booleans())
def test_any_row_is_a_conversation_or_unusable(row: Any, answered: bool) -> None:
    try:
        found = conversation_of(row, answered=answered)
    except Unusable as error:
        assert 0 < len(error.reason) < 80 and len(str(error).splitlines()) == 1
        return
    assert bool(found.messages) != bool(found.text)
    assert all(message["role"] in ROLES and isinstance(message["content"], str) for message in found.messages)
    kept = [found.messages, found.tools, found.text, found.keywords, found.meta, found.answer_ids]
    json.dumps(kept, ensure_ascii=False, allow_nan=False).encode()  # what is kept can be written
    again = conversation_of({**columns_of(found)}, answered=answered)
    assert again == Conversation(**{**vars(found), "replaced": 0}), "a second reading changes nothing"


def columns_of(found: Conversation) -> dict[str, Any]:
    """The row that a conversation is written as."""
    body = {"text": found.text} if found.text else {"messages": found.messages, "answer_ids": found.answer_ids}
    return {**body, "tools": found.tools, "chat_template_kwargs": found.keywords, "meta": found.meta}
