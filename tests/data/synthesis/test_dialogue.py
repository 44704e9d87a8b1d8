"""A conversation answered turn by turn: where turns begin and end, and what becomes of it."""

from typing import Any

import pytest

from spechead.data.conversation import Conversation
from spechead.data.messages import Unusable
from spechead.data.synthesis.dialogue import Answer, Dialogue, split_turns


def chat(text: str) -> Conversation:
    """`s u a u` -> messages of these roles; the content of the i-th is its letter and i."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return Conversation([{"role": roles[c], "content": f"{c}{i}"} for i, c in enumerate(text.split())])


def shown(messages: list[dict[str, Any]]) -> str:
    return " ".join(message["content"] for message in messages)


@pytest.mark.parametrize(
    ("roles", "turns", "ended"),
    [
        ("u", ["u0"], ""),
        ("s u a u a", ["s0 u1", "u3"], ""),
        ("u u u", ["u0", "u1", "u2"], ""),  # a list of turns
        ("s a u a", ["s0 u2"], ""),  # the assistant's own greeting is not the target's
        ("u d a u", ["u0 d1", "u3"], ""),
        ("u a d u", ["u0", "d2 u3"], ""),
        ("u a s", ["u0"], ""),
        ("u a t a u", ["u0"], "before a tool's result"),
        ("u t a u", ["u0"], "before a tool's result"),
    ],
)
def test_turns(roles: str, turns: list[str], ended: str) -> None:
    found, how = split_turns(chat(roles))
    assert ([shown(turn) for turn in found], how) == (turns, ended)


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (Conversation([], text="a document"), "a plain text"),
        (chat("s"), "no user turn"),
        (chat("s a"), "no user turn"),
        (chat("t u"), "no user turn"),
    ],
)
def test_conversations_without_a_turn_are_unusable(conversation: Conversation, reason: str) -> None:
    with pytest.raises(Unusable) as error:
        Dialogue(0, "x", conversation)
    assert error.value.reason == reason


def test_a_row_from_a_file_whose_name_is_no_text_can_be_written() -> None:
    dialogue = Dialogue(0, "x\udce9.jsonl line 1", chat("u"))
    assert dialogue.open()
    dialogue.add(Answer("one", [7, 2], True))
    assert dialogue.row("tiny", "")["meta"]["source"] == "x\ufffd.jsonl line 1"


def test_the_targets_answers_take_the_place_of_the_sources() -> None:
    dialogue = Dialogue(4, "f line 5", chat("s u a u a"))
    assert dialogue.open() and shown(dialogue.messages) == "s0 u1"
    dialogue.add(Answer("one", [7, 2], True))
    assert dialogue.open() and shown(dialogue.messages) == "s0 u1 one u3"
    dialogue.add(Answer("two", [8, 2], True))
    assert not dialogue.open()
    row = dialogue.row("tiny", "digest")
    assert shown(row["messages"]) == "s0 u1 one u3 two" and row["answer_ids"] == [[7, 2], [8, 2]]
    assert row["meta"] == {
        "finish": "eos",
        "target": "tiny",
        "temperature": 0.0,
        "source": "f line 5",
        "tokenizer": "digest",
    }
    assert dialogue.count() == {"turns": 2, "tokens": 4} and not dialogue.ended


def test_a_cut_answer_and_a_tool_call_are_the_last() -> None:
    dialogue = Dialogue(0, "x", chat("u u"))
    assert dialogue.open()
    dialogue.add(Answer("one", [7], False))
    assert not dialogue.open() and dialogue.ended == "with an answer cut by the cap"
    assert dialogue.row("t", "")["meta"]["finish"] == "length" and dialogue.count()["truncated"] == 1
    dialogue = Dialogue(0, "x", chat("u u"))
    assert dialogue.open()
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    dialogue.add(Answer("", [], True, tokens=9, reasoning="hm", tool_calls=[call]))
    assert not dialogue.open() and dialogue.ended == "with a tool call"
    assert dialogue.messages[-1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    assert dialogue.count()["tokens"] == 9


def test_a_turn_that_cannot_be_answered_ends_the_conversation_before_it() -> None:
    dialogue = Dialogue(0, "x", chat("s u u u"))
    assert dialogue.open()
    dialogue.add(Answer("one", [7, 2], True))
    assert dialogue.open()
    dialogue.stop("refused")
    assert not dialogue.open() and not dialogue.dropped and dialogue.ended == "refused"
    assert shown(dialogue.row("t", "")["messages"]) == "s0 u1 one"
    first = Dialogue(0, "x", chat("s u u u"))
    assert first.open()
    first.stop("refused")
    assert first.dropped == "refused" and not first.open()


def test_a_conversation_of_empty_answers_is_dropped() -> None:
    dialogue = Dialogue(0, "x", chat("u u"))
    assert dialogue.open()
    dialogue.add(Answer(" ", [2], True))
    assert dialogue.dropped == "empty answer" and dialogue.open()
    dialogue.add(Answer("two", [8, 2], True))
    assert not dialogue.dropped


def test_tools_keywords_and_kind_are_kept_and_turns_are_limited() -> None:
    conversation = chat("u u u")
    conversation.tools, conversation.keywords = [{"type": "function"}], {"enable_thinking": False}
    conversation.meta = {"kind": "maths", "finish": "length", "target": "another"}
    dialogue = Dialogue(0, "x", conversation, max_turns=1)
    assert dialogue.open()
    dialogue.add(Answer("one", [7, 2], True))
    assert not dialogue.open() and dialogue.ended == "at the largest number of turns"
    row = dialogue.row("tiny", "")
    assert (row["tools"], row["chat_template_kwargs"]) == ([{"type": "function"}], {"enable_thinking": False})
    assert (row["meta"]["kind"], row["meta"]["finish"], "tokenizer" in row["meta"]) == ("maths", "eos", False)


def test_temperature_and_seeds_follow_from_number_and_seed_alone() -> None:
    def draws(seed: int) -> list[tuple[float, int]]:
        dialogues = [Dialogue(i, "x", chat("u u"), temperatures=[0.0, 0.7, 1.0], seed=seed) for i in range(60)]
        return [(dialogue.temperature, dialogue.turn_seed) for dialogue in dialogues]

    assert draws(0) == draws(0) != draws(1)
    assert {temperature for temperature, _ in draws(0)} == {0.0, 0.7, 1.0}
    assert len({seed for _, seed in draws(0)}) == 60 and all(0 <= seed < 2**31 for _, seed in draws(0))
    dialogue = Dialogue(0, "x", chat("u u"))
    before = dialogue.turn_seed
    assert dialogue.open()
    dialogue.add(Answer("one", [7, 2], True))
    assert dialogue.turn_seed != before
