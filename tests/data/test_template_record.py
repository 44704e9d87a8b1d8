"""The template in use and the recorded one, and whether they are one."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from spechead.data.template_record import (
    date_of_data,
    recorded_date,
    recorded_template,
    template_warning,
    template_warnings,
)
from spechead.errors import UserError
from spechead.target.chat_template import prompt_ids
from tests.helpers.targets import make_toy_tokenizer

THINK = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if not thinking %}(no){% endif %}{% endif %}"
)


def test_keywords_that_differ_are_named_and_make_other_prompts() -> None:
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = THINK
    ours, theirs = {"thinking": True}, {"thinking": False}
    chat = [{"role": "user", "content": "hi"}]
    assert prompt_ids(tokenizer, chat, ours) != prompt_ids(tokenizer, chat, theirs)
    warning = template_warning({"template_kwargs": ours}, {"template_kwargs": theirs}, "head runs/a/head was trained")
    assert warning == (
        'head runs/a/head was trained with template keywords {"thinking": false}, here they are {"thinking": true}: '
        "where the prompts' form differs, drafts fit worse"
    )


def test_another_template_is_named() -> None:
    warning = template_warning({"chat_template": "{{ a }}"}, {"template_kwargs": {}}, "it was written")
    assert warning == "it was written with another chat template: where the prompts' form differs, drafts fit worse"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"template_kwargs": {"a": 1, "b": [2]}}, {"template_kwargs": {"b": [2], "a": 1}, "chat_template": ""}),
        ({"template_kwargs": {"a": 1}}, None),
        ({"template_date": "2026-01-01"}, {"template_date": "2025-01-01"}),
    ],
)
def test_equal_or_unknown_records_are_not_reported(ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    assert template_warning(ours, theirs, "it was written") == ""


@pytest.mark.parametrize(
    ("meta", "record"),
    [
        ({"options": {"template_kwargs": {"thinking": False}}}, {"template_kwargs": {"thinking": False}}),
        ({"made": "by hand"}, None),
        ([1], None),
    ],
)
def test_what_a_file_was_written_with(meta: object, record: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.meta.json").write_text(json.dumps(meta))
    assert recorded_template(str(tmp_path / "a.jsonl")) == record


def test_the_date_of_the_first_record_that_has_one(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in "abc")
    one.write_text(json.dumps({"options": {"template_date": ""}}))
    two.write_text(json.dumps({"template_date": "2024-07-26"}))
    assert recorded_date(one, two, three) == recorded_date(three, two) == "2024-07-26"
    assert recorded_date(one, three) == recorded_date() == datetime.date.today().isoformat()


def test_sources_that_were_written_otherwise_are_named_and_bring_their_date(tmp_path: Path) -> None:
    one, two = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    record = {"template_kwargs": {"a": 1}, "template_date": "2024-07-26"}
    Path(two + ".meta.json").write_text(json.dumps({"options": record}))
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "index.json").write_text(json.dumps({"template": {"template_kwargs": {}}}))
    [line] = template_warnings({"template_kwargs": {}}, [one, two, str(tmp_path / "prepared")])
    assert line.startswith(f"{two} was written with template keywords") and "(options template_kwargs" in line
    assert date_of_data([one, two]) == "2024-07-26" and date_of_data([one]) == ""


def test_files_without_a_record(tmp_path: Path) -> None:
    assert recorded_template(str(tmp_path / "a.jsonl")) is None
    assert recorded_template("hf:org/data:train") is None
    (tmp_path / "a.jsonl.meta.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.jsonl\.meta\.json is not valid JSON"):
        recorded_template(str(tmp_path / "a.jsonl"))
