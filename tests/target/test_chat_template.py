"""Chat templates: where an answer begins and ends, what is recorded, and what is refused."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from spechead.errors import UserError
from spechead.files import shipped
from spechead.target.chat_template import ChatTemplate, TemplateError, check_date, prompt_ids, read_template
from tests.helpers.targets import CHATML, make_toy_tokenizer

HI = [{"role": "user", "content": "Hi"}]
DATED = "{{ strftime_now('%d %b %Y') }} {{ strftime_now(\"%Y\") }}" + CHATML
NO_OPENING = CHATML.partition("{% if add_generation_prompt")[0]


def with_template(own: Any, **fields: Any) -> ChatTemplate:
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = own
    return ChatTemplate(tokenizer, **fields)


def test_the_prompt_ends_where_the_answer_begins() -> None:
    for text in (CHATML, NO_OPENING):
        chat = with_template(text)
        assert chat.prompt_text(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert prompt_ids(chat.tokenizer, HI) == chat.prompt_ids(HI) == chat.tokenize(chat.prompt_text(HI))


@pytest.mark.parametrize(
    ("text", "ending", "terminator", "stops"),
    [
        (CHATML, "<|im_end|>\n", "<|im_end|>", ["<|im_end|>"]),
        (
            "{% for m in messages %}{{ m['content'] }} <pad><|im_end|>{% endfor %}",
            " <pad><|im_end|>",
            " <pad>",
            ["<pad>"],
        ),
        ("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}", "\n", "", []),
        # The text before the control token is written as well.
        (
            "{% for m in messages %}{{ m.content | tojson }}<|im_end|>\n{% endfor %}",
            '"<|im_end|>\n',
            '"<|im_end|>',
            ["<|im_end|>"],
        ),
        # The answer is shown before its turn, too.
        ("{{ messages[-1].content }}<pad>" + CHATML, "<|im_end|>\n", "<|im_end|>", ["<|im_end|>"]),
        # A call ends otherwise than a text.
        (
            "{% for m in messages %}{{ m['content'] }}{% if m.tool_calls %}call<pad>{% else %}<|im_end|>{% endif %}"
            "{% endfor %}",
            "<|im_end|>",
            "<|im_end|>",
            ["<pad>", "<|im_end|>"],
        ),
    ],
)
def test_what_ends_a_turn(text: str, ending: str, terminator: str, stops: list[str]) -> None:
    chat = with_template(text)
    assert (chat.ending, chat.terminator) == (ending, terminator)
    assert chat.stop_ids == set(chat.tokenizer.convert_tokens_to_ids(stops))


def test_keywords_reach_the_template() -> None:
    chat = with_template("{{ style }}" + CHATML, keywords={"style": "a"})
    assert chat.render(HI).startswith("a<|im_start|>") and chat.render(HI, keywords={"style": "b"}).startswith("b<")


def test_arguments_of_a_call_are_given_as_text_where_the_template_joins_them() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
    joining = "{% for m in messages %}" + calls + "{% endfor %}"
    call = {"function": {"name": "f", "arguments": {"a": "ü"}}}
    assert with_template(joining).render([*HI, {"role": "assistant", "tool_calls": [call]}]) == 'call {"a": "ü"}'
    with pytest.raises(TemplateError, match="refuses a chat"):
        with_template(joining).render(
            [*HI, {"role": "assistant", "tool_calls": [{"function": {"arguments": None}}, 3]}]
        )


def test_a_date_is_fixed_and_recorded_where_the_template_prints_it() -> None:
    chat = with_template(DATED, date="2024-07-26")
    assert chat.render(HI).startswith("26 Jul 2024 2024<|im_start|>")
    assert chat.record()["template_date"] == "2024-07-26"
    assert with_template(CHATML, date="2024-07-26").record()["template_date"] == ""
    today = datetime.date.today()
    assert with_template(DATED).render(HI).startswith(today.strftime("%d %b %Y"))
    assert with_template(DATED).record()["template_date"] == today.isoformat()


def test_what_changes_the_text_changes_the_digest() -> None:
    base = with_template(DATED, date="2024-07-26")
    others = [
        with_template(DATED, date="2024-07-27"),
        with_template(DATED + " ", date="2024-07-26"),
        with_template(DATED, date="2024-07-26", keywords={"a": 1}),
        with_template(CHATML, text=DATED + "x", date="2024-07-26"),
    ]
    assert len({chat.digest for chat in (base, *others)}) == 5
    assert with_template(DATED, date="2024-07-26").digest == base.digest
    assert with_template(CHATML, date="2024-07-26").digest == with_template(CHATML, date="2024-07-27").digest
    more = make_toy_tokenizer()
    more.add_tokens(["<new>"])
    assert ChatTemplate(more).tokenizer_digest != base.tokenizer_digest == with_template(CHATML).tokenizer_digest


def test_one_of_several_templates() -> None:
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = {"default": "D" + CHATML, "tool_use": "T" + CHATML, "brief": "B" + CHATML}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate(tokenizer).render(HI)[0] == "D" and ChatTemplate(tokenizer).render(HI, tools)[0] == "T"
    brief = ChatTemplate(tokenizer, read_template("brief", tokenizer))
    assert brief.render(HI)[0] == brief.render(HI, tools)[0] == "B"
    with pytest.raises(UserError, match="'other' is neither a file nor a Jinja template; the target's own are default"):
        read_template("other", tokenizer)


def test_a_template_from_a_file_or_a_text(tmp_path: Path) -> None:
    tokenizer = make_toy_tokenizer()
    (tmp_path / "t.jinja").write_text(DATED)
    assert read_template(str(tmp_path / "t.jinja"), tokenizer) == read_template(DATED, tokenizer) == DATED
    assert read_template("", tokenizer) == ""
    name = "recipes/templates/vicuna.jinja"
    assert read_template(f"shipped:{name}", tokenizer) == shipped(name).read_text()
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UserError, match="option chat_template: cannot read .*bytes: it is not UTF-8 text"):
        read_template(str(tmp_path / "bytes"), tokenizer)
    with pytest.raises(UserError, match="option chat_template: 'none.jinja' is neither a file nor a Jinja template"):
        read_template("none.jinja", tokenizer)


def test_vicunas_template_writes_what_it_was_trained_on() -> None:
    chat = with_template(None, text=read_template("shipped:recipes/templates/vicuna.jinja", None))
    messages = [*HI, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "So?"}]
    prompt = chat.prompt_text(messages)
    assert prompt.startswith("A chat between a curious user and an artificial intelligence assistant.")
    assert prompt.endswith("questions. USER: Hi ASSISTANT: Yo<|im_end|>USER: So? ASSISTANT:")
    system = {"role": "system", "content": "Be kind."}
    assert chat.prompt_text([system, *HI]) == "Be kind. USER: Hi ASSISTANT:"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{% if %}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_named(text: str) -> None:
    with pytest.raises(TemplateError, match="the chat template of the tokenizer .* refuses a chat: "):
        with_template(text).render(HI)
    assert with_template(text).stop_ids == frozenset()


def test_a_tokenizer_without_template_is_a_user_error_that_names_the_option() -> None:
    with pytest.raises(UserError, match="it has none; give one as option chat_template"):
        with_template(None).prompt_ids(HI)


def test_a_target_may_have_no_tokenizer() -> None:
    assert ChatTemplate(None).stop_ids == frozenset()
    assert with_template(None).stop_ids == frozenset()


def test_dates_are_checked() -> None:
    check_date("")
    check_date("2026-12-01")
    with pytest.raises(UserError, match="option template_date: must be a date as YYYY-MM-DD, got '1 May'"):
        check_date("1 May")


def test_a_mistake_in_a_template_is_named_with_its_line() -> None:
    with pytest.raises(UserError, match="option chat_template: line 2 of the template: "):
        read_template("{{ a }}\n{% if %}", None)
    marked = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert read_template(marked, None) == marked
