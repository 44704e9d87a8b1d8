"""Prompt files: the shipped one, foreign ones, broken ones; and the choice of a few over all kinds."""

import json
from collections import Counter
from pathlib import Path

import pytest

from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.errors import UserError
from spechead.files import shipped

KINDS = ["writing", "roleplay", "reasoning", "maths", "coding", "extraction", "explanation", "translation"]


def test_shipped_prompts_are_forty_of_eight_kinds() -> None:
    prompts = read_prompts(shipped("eval/prompts/held_out.jsonl"))
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(KINDS, 5)
    assert [prompt.question_id for prompt in prompts] == list(range(1, 41))
    assert len({prompt.text for prompt in prompts}) == 40
    assert all(30 <= len(prompt.text) <= 600 for prompt in prompts)


def test_no_held_out_prompt_is_in_the_training_sample() -> None:
    sample = shipped("data/sample.jsonl").read_text(encoding="utf-8")
    for prompt in read_prompts(shipped("eval/prompts/held_out.jsonl")):
        assert json.dumps(prompt.text)[1:-1] not in sample and prompt.text not in sample


def test_rows_with_turns_alone_get_a_number_and_the_category_other(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"turns": ["one", "two"]}\n\n{"question_id": "b", "category": "", "turns": ["three"]}\n')
    assert read_prompts(path) == [Prompt(1, "other", "one"), Prompt("b", "other", "three")]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(r'{"question_id": "\ud800", "category": "c\udfff", "turns": ["a\ud83d"]}')
    assert read_prompts(path) == [Prompt("\ufffd", "c\ufffd", "a\ufffd")]


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', "true", "1.5"])
def test_a_question_id_that_identifies_nothing_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"question_id": {text}, "turns": ["a"]}}')
    with pytest.raises(UserError, match=r"x.jsonl line 1: question_id must be a whole number or text, not .*$"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": \n', "line 2: not valid JSON"),
        ('{"turns": []}', "line 1: no prompt"),
        ('{"turns": "a"}', "line 1: no prompt"),
        ('{"turns": ["  "]}', "line 1: no prompt"),
        ('["a"]', "line 1: no prompt"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ("\n\n", "contains no prompts"),
        (
            '{"question_id": 7, "turns": ["a"]}\n{"question_id": 7, "turns": ["b"]}',
            "question_id 7 is there twice",
        ),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=f"x.jsonl.*{message}|{message}"):
        read_prompts(path)


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the prompts .*nothing.jsonl"):
        read_prompts(tmp_path / "nothing.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(tmp_path / "bytes")


def test_spread_takes_the_first_of_each_kind_in_file_order() -> None:
    prompts = [Prompt(i, "abbcca"[i], "?") for i in range(6)]
    assert [p.question_id for p in balanced(prompts, 3)] == [0, 1, 3]
    assert [p.question_id for p in balanced(prompts, 4)] == [0, 1, 3, 5]
    assert balanced(prompts, 0) == [] and balanced(prompts, 99) == prompts
