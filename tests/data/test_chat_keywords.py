"""Two uses of a chat template, and whether they are one."""

import json
from pathlib import Path
from typing import Any

import pytest

from spechead.data.chat import keywords_of_data, prompt_ids, template_warning
from spechead.errors import UserError
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
    warning = template_warning(ours, theirs, "head runs/a/head was trained")
    assert warning == (
        'head runs/a/head was trained with template keywords {"thinking": false}, here they are {"thinking": true}: '
        "where the prompts' form differs, drafts fit worse"
    )


@pytest.mark.parametrize("ours,theirs", [({}, {}), ({"a": 1, "b": [2]}, {"b": [2], "a": 1}), ({"a": 1}, None)])
def test_equal_or_unknown_keywords_are_not_told(ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    assert template_warning(ours, theirs, "it was written") == ""


@pytest.mark.parametrize(
    ("meta", "keywords"),
    [
        ({"options": {"template_kwargs": {"thinking": False}}}, {"thinking": False}),
        ({"options": {"count": 3}}, {}),
        ({"made": "by hand"}, None),
        ([1], None),
    ],
)
def test_what_a_file_was_written_with(meta: object, keywords: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.meta.json").write_text(json.dumps(meta))
    assert keywords_of_data(str(tmp_path / "a.jsonl")) == keywords


def test_files_without_a_record(tmp_path: Path) -> None:
    assert keywords_of_data(str(tmp_path / "a.jsonl")) is None
    assert keywords_of_data("hf:org/data:train") is None
    (tmp_path / "a.jsonl.meta.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.jsonl\.meta\.json is not valid JSON"):
        keywords_of_data(str(tmp_path / "a.jsonl"))
