"""Answers are trained as they are served, over the templates of many families: prompts, answers and samples by hand."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random
from typing import Any

import pytest

from spechead.data.conversation import Conversation, Unusable, conversation_of
from spechead.data.encode import Encoded, encode
from spechead.target.chat_template import ChatTemplate
from tests.helpers.templates import DATE, FAMILIES, make_tokenizer

Row = dict[str, Any]
QUESTIONS = ("Hi?", "And then?", "Why..", "Half?")
ANSWERS = ("Hello there..", "Then it ends..", "Half:\n\n\nas much", "é☃!")
THOUGHTS = ("A greeting.", "So\n\nit ends.", "Hm..", "é?")
SYSTEM = {"role": "system", "content": "Be brief."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


@dataclass(frozen=True)
class Writing:
    """What the target of a family writes after a prompt. %A: the answer, %T: the thought before it."""

    answer: str
    stops: frozenset[str]  # that end a turn
    call: str = ""  # CALL, as the target writes it
    thought: str = ""  # with the answer; empty: the answer's text begins with <think>
    thought_call: str = ""
    call_in_text: bool = False  # the template shows only the content of a call
    anchor: str = ""  # what the prompt ends with, where the tokens of the answer depend on it
    keywords: tuple[tuple[str, Any], ...] = ()
    family: str = ""  # of the template; empty: the name in the table


def ending(token: str, **other: Any) -> Writing:
    return Writing("%A" + token, frozenset([token]), **other)


XML_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MISTRAL_CALL = '[{"name": "weather", "arguments": {"city": "Paris"}, "id": "call00001"}]</s>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Paris"}}'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)
ANALYSIS = "<|channel|>analysis<|message|>%T<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>%A<|return|>"
HARMONY_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
IM_END = "<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"
XML_THOUGHT = "<think>\n%T\n</think>\n\n"
OFF = (("enable_thinking", False),)

WRITTEN: dict[str, Writing] = {
    "chatml": ending(IM_END),
    "llama3": ending("<|eot_id|>", call=LLAMA_CALL + "<|eot_id|>"),
    "llama3 ipython": Writing(
        "%A<|eot_id|>",
        frozenset(["<|eot_id|>", "<|eom_id|>"]),
        call=LLAMA_CALL + "<|eom_id|>",
        keywords=(("builtin_tools", ["search"]), ("date_string", "1 Jan 2025")),
        family="llama3",
    ),
    "qwen2.5": ending(IM_END, call=XML_CALL + IM_END),
    "qwen3": Writing(
        EMPTY + "%A" + IM_END,
        frozenset([IM_END]),
        call=EMPTY + XML_CALL + IM_END,
        thought=XML_THOUGHT + "%A" + IM_END,
        thought_call=XML_THOUGHT + XML_CALL + IM_END,
    ),
    "qwen3 off": ending(IM_END, call=XML_CALL + IM_END, keywords=OFF, family="qwen3"),
    "deepseek-r1-distill": ending("<｜end▁of▁sentence｜>", thought="%T\n</think>\n\n%A<｜end▁of▁sentence｜>"),
    "deepseek-v3": ending("<｜end▁of▁sentence｜>", call=DEEPSEEK_CALL),
    "gemma2": ending("<end_of_turn>"),
    "gemma3": ending("<end_of_turn>"),
    "mistral-v0.3": Writing(" %A</s>", frozenset(["</s>"]), call="[TOOL_CALLS] " + MISTRAL_CALL, anchor="[/INST]"),
    "mistral-nemo": Writing("%A</s>", frozenset(["</s>"]), call="[TOOL_CALLS]" + MISTRAL_CALL),
    "phi3": ending("<|end|>"),
    "phi4": ending(IM_END),
    "gpt-oss": Writing(
        FINAL,
        frozenset(["<|return|>", "<|call|>"]),
        call=HARMONY_CALL,
        thought=ANALYSIS + FINAL,
        thought_call=ANALYSIS + HARMONY_CALL,
    ),
    "granite3": ending("<|end_of_text|>", call=f"<|tool_call|>[{LLAMA_CALL}]<|end_of_text|>", call_in_text=True),
    "granite3 short": ending(
        "<|end_of_text|>",
        call=f"<|tool_call|>[{LLAMA_CALL}]<|end_of_text|>",
        call_in_text=True,
        keywords=(("controls", {"length": "short"}),),
        family="granite3",
    ),
    "smollm3": ending(
        IM_END,
        call=XML_CALL + IM_END,
        thought=XML_THOUGHT + "%A" + IM_END,
        thought_call=XML_THOUGHT + XML_CALL + IM_END,
        call_in_text=True,
    ),
    "smollm3 off": ending(IM_END, call=XML_CALL + IM_END, call_in_text=True, keywords=OFF, family="smollm3"),
    "vicuna": Writing(" %A</s>", frozenset(["</s>"]), anchor="ASSISTANT:"),
}

# Number of samples of each kind of conversation; x: the template refuses it, or what the target wrote is unknown.
#   plain, system: one, two, four answers      tools: a call, its result, an answer; and with a second question
#   <think>: thoughts in the text              field: thoughts in a field of their own, of one answer, two, and a call
KINDS = (
    *("plain 1", "plain 2", "plain 4", "system 1", "system 2", "system 4"),
    *("tools", "tools system", "tools again", "<think> 1", "<think> 2", "field 1", "field 2", "field call"),
)
SAMPLES = """
                       plain    system   tools    <think> field
chatml                 1 1 1    1 1 1    x x x    1 1     x x x
llama3                 1 1 1    1 1 1    1 1 1    1 1     x x x
llama3 ipython         1 1 1    1 1 1    1 1 1    1 1     x x x
qwen2.5                1 1 1    1 1 1    1 1 1    1 1     x x x
qwen3                  1 2 4    1 2 4    2 2 3    1 2     1 2 1
qwen3 off              1 2 4    1 2 4    2 2 3    x x     x x x
deepseek-r1-distill    x x x    x x x    x x x    1 2     1 2 x
deepseek-v3            1 1 1    1 1 1    x x x    1 1     x x x
gemma2                 1 1 1    x x x    x x x    1 1     x x x
gemma3                 1 1 1    1 1 1    x x x    1 1     x x x
mistral-v0.3           1 1 1    1 2 4    1 2 2    1 1     x x x
mistral-nemo           1 1 1    1 2 4    1 2 2    1 1     x x x
phi3                   1 1 1    1 1 1    x x x    1 1     x x x
phi4                   1 1 1    1 1 1    x x x    1 1     x x x
gpt-oss                1 2 4    1 2 4    1 1 2    1 2     1 2 1
granite3               1 1 1    1 1 1    1 1 1    1 1     x x x
granite3 short         1 2 4    1 2 4    2 2 3    1 2     x x x
smollm3                1 1 1    1 1 1    1 1 1    1 1     1 2 2
smollm3 off            1 1 1    1 1 1    1 1 1    x x     x x x
vicuna                 1 1 1    1 1 1    x x x    1 1     x x x
"""


def table() -> dict[tuple[str, str], str]:
    rows = [line.rsplit(maxsplit=len(KINDS)) for line in SAMPLES.strip().splitlines()[1:]]
    return {
        (name.strip(), kind): number for name, *numbers in rows for kind, number in zip(KINDS, numbers, strict=True)
    }


TABLE = table()
USED = [case for case, number in TABLE.items() if number != "x"]
REFUSED = [case for case, number in TABLE.items() if number == "x"]


# ------------------------------------------------------------------------------------------------ conversations


@cache
def chat_of(name: str) -> ChatTemplate:
    written = WRITTEN[name]
    return ChatTemplate(make_tokenizer(written.family or name), keywords=dict(written.keywords), date=DATE)


def row_of(name: str, kind: str) -> tuple[Row, list[str]]:
    """The row of a dataset, and what the target wrote, turn by turn."""
    written, (what, _, detail) = WRITTEN[name], kind.partition(" ")
    if what == "tools" or detail == "call":
        return tool_row(written, kind)
    messages: list[Row] = [SYSTEM] if what == "system" else []
    texts = []
    for question, thought, answer in list(zip(QUESTIONS, THOUGHTS, ANSWERS, strict=True))[: int(detail)]:
        shown = f"<think>\n{thought}\n</think>\n\n{answer}" if what == "<think>" else answer
        field = {"reasoning_content": thought} if what == "field" else {}
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": shown, **field}]
        if written.thought and thinks(name, what):
            texts.append(written.thought.replace("%T", thought).replace("%A", answer))
        else:
            texts.append(written.answer.replace("%A", shown))
    return {"messages": messages}, texts


def thinks(name: str, what: str) -> bool:
    """Whether a thought is distinguished from the answer: for gpt-oss, one in the text is text."""
    return what == "field" or (what == "<think>" and name != "gpt-oss")


def tool_row(written: Writing, kind: str) -> tuple[Row, list[str]]:
    call: Row = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    texts = [written.call, written.answer.replace("%A", "Rain.")]
    if written.call_in_text:
        [end] = written.stops
        call = {"role": "assistant", "content": written.call.removesuffix(end)}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "rain"}
    messages = [{"role": "user", "content": "Paris?"}, call, result, {"role": "assistant", "content": "Rain."}]
    if kind == "field call":
        messages[1] = {**call, "reasoning_content": "Look."}
        messages[3] = {**messages[3], "reasoning_content": "It rains."}
        thought = written.thought.replace("%T", "It rains.").replace("%A", "Rain.")
        texts = [written.thought_call.replace("%T", "Look."), thought]
    if kind == "tools system":
        messages = [SYSTEM, *messages]
    if kind == "tools again":
        messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
        texts.append(written.answer.replace("%A", "Yes."))
    return {"messages": messages, "tools": TOOLS}, texts


def conversation(name: str, kind: str, **more: Any) -> Conversation:
    return conversation_of(row_of(name, kind)[0] | more)


def ids_of(name: str, text: str) -> list[int]:
    """The ids of a text after the end of a prompt."""
    chat, anchor = chat_of(name), WRITTEN[name].anchor
    return chat.tokenize(anchor + text)[len(chat.tokenize(anchor)) :]


# ------------------------------------------------------------------------------------------------ samples


def spans(sample: Encoded) -> list[tuple[int, int]]:
    """The runs of supervised tokens."""
    assert len(sample.ids) == len(sample.supervised)
    edges = [False, *sample.supervised, False]
    changes = [i for i in range(len(edges) - 1) if edges[i] != edges[i + 1]]
    return list(zip(changes[::2], changes[1::2], strict=True))


def answers(samples: list[Encoded]) -> list[list[int]]:
    return [sample.ids[first:end] for sample in samples for first, end in spans(sample)]


@cache
def encoded(name: str, kind: str, history: str = "each") -> list[Encoded]:
    return encode(chat_of(name), conversation(name, kind), history=history, counts=Counter())


def encoded_row(name: str, kind: str, **more: Any) -> list[Encoded]:
    """As `encoded`, with more columns in the row."""
    return encode(chat_of(name), conversation(name, kind, **more))


def test_the_tables_cover_the_families() -> None:
    assert {WRITTEN[name].family or name for name, _ in TABLE} == set(FAMILIES)
    assert {name for name, _ in TABLE} == set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_stop_ids(name: str) -> None:
    tokenizer = make_tokenizer(WRITTEN[name].family or name)
    assert {str(tokenizer.convert_ids_to_tokens(stop)) for stop in chat_of(name).stop_ids} == WRITTEN[name].stops


@pytest.mark.parametrize(("name", "kind"), USED)
def test_each_answer_follows_the_prompt_that_is_served(name: str, kind: str) -> None:
    chat, asked, samples = chat_of(name), conversation(name, kind), encoded(name, kind)
    places = [i for i, message in enumerate(asked.messages) if message["role"] == "assistant"]
    prompts = [chat.prompt_ids(asked.messages[:place], asked.tools) for place in places]
    assert [sample.ids[:first] for sample in samples for first, _ in spans(sample)] == prompts


@pytest.mark.parametrize(("name", "kind"), USED)
def test_what_the_target_wrote_is_supervised(name: str, kind: str) -> None:
    _, texts = row_of(name, kind)
    samples = encoded(name, kind)
    found, stops = answers(samples), chat_of(name).stop_ids
    shown = [str(chat_of(name).tokenizer.decode(ids, skip_special_tokens=False)) for ids in found]
    assert [text.lstrip() for text in shown] == [text.lstrip() for text in texts]
    assert found == [ids_of(name, text) for text in texts]
    assert all(ids[-1] in stops for ids in found)
    assert len(samples) == int(TABLE[name, kind])


@pytest.mark.parametrize(("name", "kind"), USED)
def test_with_history_last_the_last_sample_is_left(name: str, kind: str) -> None:
    [last] = encoded(name, kind, history="last")
    assert last == encoded(name, kind)[-1]


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_cannot_be_served_is_refused(name: str, kind: str) -> None:
    with pytest.raises(Unusable):
        encoded(name, kind)


# ------------------------------------------------------------------------------------------------ ids and cuts


SINGLE = re.compile(r"</?think>|[\s\S]")  # a control token or a character


def byte_by_byte(name: str, text: str) -> list[int]:
    """The ids of a text in which no tokens are merged: a target may write so."""
    chat = chat_of(name)
    end = next(stop for stop in WRITTEN[name].stops if text.endswith(stop))
    space = chat.tokenize("a  ")[-1:]
    pieces = [space if part == " " else ids_of(name, part) for part in SINGLE.findall(text.removesuffix(end))]
    return [*chain.from_iterable(pieces), *chat.tokenize(end)]


@pytest.mark.parametrize("kind", ["plain 2", "system 2"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma3", "mistral-v0.3", "phi3", "vicuna"])
def test_kept_ids_are_supervised_as_they_are(name: str, kind: str) -> None:
    _, texts = row_of(name, kind)
    kept = [byte_by_byte(name, text) for text in texts]
    assert kept != [ids_of(name, text) for text in texts]
    counts: Counter[str] = Counter()
    samples = encode(chat_of(name), conversation(name, kind, answer_ids=kept), counts=counts)
    assert answers(samples) == kept
    asked = conversation(name, kind)
    # The second prompt spells the first answer otherwise, so that the second turn is a sample of its own.
    places = [i for i, message in enumerate(asked.messages) if message["role"] == "assistant"]
    prompts = [chat_of(name).prompt_ids(asked.messages[:place]) for place in places]
    assert [sample.ids[:first] for sample in samples for first, _ in spans(sample)] == prompts
    assert len(samples) == 2


@pytest.mark.parametrize(("name", "kind"), USED)
def test_kept_ids_that_are_those_of_the_text_change_nothing(name: str, kind: str) -> None:
    kept = [ids_of(name, text) for text in row_of(name, kind)[1]]
    assert encoded_row(name, kind, answer_ids=kept) == encoded(name, kind)


@pytest.mark.parametrize("name", [name for name in WRITTEN if TABLE[name, "plain 2"] != "x"])
def test_an_answer_that_the_length_cap_cut_does_not_stop(name: str) -> None:
    samples = encoded_row(name, "plain 2", meta={"finish": "length"})
    first, last = row_of(name, "plain 2")[1]
    end = next(stop for stop in WRITTEN[name].stops if last.endswith(stop))
    assert answers(samples) == [ids_of(name, first), ids_of(name, last.removesuffix(end))]


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "phi3", "phi4", "granite3", "mistral-nemo", "deepseek-v3"])
@pytest.mark.parametrize("answer", ["\n\nYo", "\nYo.", " Yo", ".."])
def test_an_answer_that_merges_with_the_prompt_is_cut_where_decoding_begins(name: str, answer: str) -> None:
    messages = [{"role": "user", "content": "Hi\n."}, {"role": "assistant", "content": answer}]
    chat = chat_of(name)
    [sample] = encode(chat, conversation_of({"messages": messages}))
    [(first, end)] = spans(sample)
    assert sample.ids[:first] == chat.prompt_ids(messages[:1])
    assert sample.ids[first:end] == chat.tokenize(WRITTEN[name].answer.replace("%A", answer))


def answered(name: str, *turns: Row, **more: Any) -> list[str]:
    """What is supervised of a question and the turns after it, as text."""
    samples = encode(chat_of(name), conversation_of({"messages": [{"role": "user", "content": "Hi?"}, *turns]} | more))
    tokenizer = chat_of(name).tokenizer
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in answers(samples)]


def assistant(content: str, **fields: Any) -> Row:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize("content", ["Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes."])
def test_a_thought_whose_beginning_is_in_the_prompt(content: str) -> None:
    """DeepSeek R1: the prompt opens the thought, so that what the target wrote begins inside it."""
    written = ["Hm.\n</think>\n\nYes.<｜end▁of▁sentence｜>"]
    assert answered("deepseek-r1-distill", assistant(content)) == written
    without = [assistant("No thought."), {"role": "user", "content": "And?"}]  # nothing is known of what was written
    assert answered("deepseek-r1-distill", *without, assistant(content)) == written


def test_kept_ids_fit_an_answer_whose_thought_the_prompt_opens() -> None:
    chat, content = chat_of("deepseek-r1-distill"), "<think>\nHm..\n</think>\n\nYes."
    kept = byte_by_byte("deepseek-r1-distill", "Hm..\n</think>\n\nYes.<｜end▁of▁sentence｜>")
    row = {"messages": [{"role": "user", "content": "Hi?"}, assistant(content)], "answer_ids": [kept]}
    assert answers(encode(chat, conversation_of(row))) == [kept]


LONG_THOUGHT = "Hm,\n\nlet me see"


@pytest.mark.parametrize("turn", [assistant(f"<think>\n{LONG_THOUGHT}"), assistant("", reasoning_content=LONG_THOUGHT)])
@pytest.mark.parametrize(
    ("name", "opening"), [("qwen3", "<think>\n"), ("smollm3", "<think>\n"), ("deepseek-r1-distill", "")]
)
def test_a_thought_that_the_length_cap_cut_has_no_end(name: str, opening: str, turn: Row) -> None:
    assert answered(name, turn, meta={"finish": "length"}) == [opening + LONG_THOUGHT]


def test_a_thought_that_the_length_cap_cut_is_in_its_channel() -> None:
    turn = assistant("", reasoning_content=LONG_THOUGHT)
    written = answered("gpt-oss", turn, meta={"finish": "length"})
    assert written == ["<|channel|>analysis<|message|>" + LONG_THOUGHT]


# ------------------------------------------------------------------------------------------------ calls

OTHER = {"id": "call00002", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULTS = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in (CALL, OTHER)]


@pytest.mark.parametrize(("name", "before"), [("qwen2.5", ""), ("qwen3", EMPTY), ("qwen3 off", "")])
def test_two_calls_and_text_before_them(name: str, before: str) -> None:
    turns = [assistant("Both:", tool_calls=[CALL, OTHER]), *RESULTS, assistant("Rain.")]
    calls = f"{XML_CALL}\n{XML_CALL.replace('Paris', 'Rome')}"
    assert answered(name, *turns, tools=TOOLS) == [f"{before}Both:\n{calls}{IM_END}", f"{before}Rain.{IM_END}"]


def test_mistral_writes_two_calls_as_one_list() -> None:
    turns = [assistant("", tool_calls=[CALL, OTHER]), *RESULTS, assistant("Rain.")]
    second = MISTRAL_CALL.replace("Paris", "Rome").replace("00001", "00002")
    both = f"{MISTRAL_CALL.removesuffix(']</s>')}, {second.removeprefix('[')}"
    assert answered("mistral-nemo", *turns, tools=TOOLS) == [f"[TOOL_CALLS]{both}", "Rain.</s>"]


@pytest.mark.parametrize("name", ["llama3", "mistral-v0.3", "gpt-oss"])
def test_a_turn_of_which_the_template_shows_a_part_is_left_out(name: str) -> None:
    """Text beside a call is dropped by two of the families, and a second call by the third."""
    turn = assistant("", tool_calls=[CALL, OTHER]) if name == "gpt-oss" else assistant("I look.", tool_calls=[CALL])
    answer = WRITTEN[name].answer.replace("%A", "Rain.").lstrip()
    shown = answered(name, turn, RESULTS[0], assistant("Rain."), tools=TOOLS)
    assert [text.lstrip() for text in shown] == [answer]


@pytest.mark.parametrize("name", ["chatml", "phi3", "phi4", "gemma3", "vicuna"])
def test_a_call_that_the_template_does_not_show_is_no_empty_answer(name: str) -> None:
    with pytest.raises(Unusable):
        answered(name, assistant("", tool_calls=[CALL]))


def test_the_end_of_a_call_follows_the_keywords_of_the_row() -> None:
    keywords = {"builtin_tools": ["search"]}
    turns = [assistant("", tool_calls=[CALL]), RESULTS[0], assistant("Rain.")]
    written = answered("llama3", *turns, tools=TOOLS, chat_template_kwargs=keywords)
    assert written == [LLAMA_CALL + "<|eom_id|>", "Rain.<|eot_id|>"]


# ------------------------------------------------------------------------------------------------ dates and keywords


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("llama3", "Today: 26 Jul 2024\n"),
        ("llama3 ipython", "Today: 1 Jan 2025\n"),
        ("gpt-oss", "Today: 2024-07-26\n"),
        ("granite3", "Today: July 26, 2024.\n"),
        ("smollm3", "Today: 26 July 2024\n"),
    ],
)
def test_the_date_of_the_options_is_in_every_prompt(name: str, shown: str) -> None:
    chat = chat_of(name)
    assert shown in chat.prompt_text([{"role": "user", "content": "Hi?"}])
    for sample in encoded(name, "plain 4"):
        assert shown in chat.tokenizer.decode(sample.ids)


def test_keywords_of_a_row_win() -> None:
    row = row_of("qwen3 off", "plain 2")[0] | {"chat_template_kwargs": {"enable_thinking": False}}
    samples = encode(chat_of("qwen3"), conversation_of(row))
    assert samples == encoded("qwen3 off", "plain 2") != encoded("qwen3", "plain 2")


# ------------------------------------------------------------------------------------------------ linear time


class Counting:
    """A tokenizer that counts the characters it renders and tokenises."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.rendered, self.tokenised = tokenizer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.tokenised += len(text)
        return self._tokenizer(text, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        text = str(self._tokenizer.apply_chat_template(*args, **options))
        self.rendered += len(text)
        return text


def work(family: str, turns: int) -> tuple[int, int]:
    """Characters rendered and tokenised for a conversation of that many questions and answers."""
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"Question {turn:02}?"}]
        messages += [{"role": "assistant", "content": f"An answer of some length, number {turn:02}."}]
    counting = Counting(make_tokenizer(family))
    [sample] = encode(ChatTemplate(counting, date=DATE), conversation_of({"messages": messages}))
    assert len(spans(sample)) == turns
    return counting.rendered, counting.tokenised


PIECES = ("Hi", "..", "\n", "\n\n", " ", "Half", "é☃", "</think>", "<think>\n", IM_END, "</s>", "[INST]", "assistant\n")


def random_chat(seed: int) -> Conversation:
    """Six answers of pieces that merge with what surrounds them, or that look like control text."""
    source = Random(seed)
    messages = []
    for turn in range(12):
        text = "".join(source.choices(PIECES[: 7 if seed % 2 else None], k=source.randint(1, 3)))
        messages.append({"role": ("user", "assistant")[turn % 2], "content": text if text.strip() else text + "x"})
    return conversation_of({"messages": messages})


@pytest.mark.parametrize("name", [name for name in WRITTEN if TABLE[name, "plain 1"] != "x"])
def test_a_long_chat_is_what_its_turns_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All turns found in one render are those rendered one by one."""
    chats = [random_chat(seed) for seed in range(4)]
    at_once = [encode(chat_of(name), chat) for chat in chats]
    monkeypatch.setattr("spechead.data.encode.FEW_TURNS", 100)
    assert [encode(chat_of(name), chat) for chat in chats] == at_once


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma3", "phi3", "phi4"])
def test_twice_the_turns_are_twice_the_work(family: str) -> None:
    short, long = work(family, 32), work(family, 64)
    assert long[0] <= 2.2 * short[0] and long[1] <= 2.2 * short[1]
