"""Reading conversations, building samples, packing and step plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.data.chat import tokenize
from spechead.data.dataset import (
    Sample,
    build_samples,
    collate,
    count_by_model,
    plan_step,
    read_conversations,
    split_validation,
)
from spechead.errors import UserError
from tests.helpers.targets import make_toy_tokenizer

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = 1 + 5 + 2 + 1 + 1 + 1 + 10


def conversation(*contents: str, **meta: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, "meta": meta}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def make_sample(length: int, row: int = 0, first: int = 0) -> Sample:
    """`length` tokens from id `first` on; all but the first are supervised."""
    return Sample(torch.arange(first, first + length), torch.arange(length) > 0, row)


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=20)


# ------------------------------------------------------------------------------------------------ reading


def test_files_are_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", conversation("a", "b"), "", conversation("c", "d"))
    two = write(tmp_path / "two.jsonl", conversation("e", "f"))
    asked = [row["messages"][0]["content"] for row in read_conversations([one, two])]
    assert asked == ["a", "c", "e"]
    assert len(read_conversations([one, two], limit=1)) == 1
    assert [r["messages"][1]["content"] for r in read_conversations([one, two], limit=3)] == ["b", "d", "f"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: no messages"),
        ({"prompt": "Hi"}, "line 2: no messages"),
        ({"messages": []}, "line 2: the conversation is empty"),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "line 2: unknown role 'human'"),
        ({"messages": [{"role": "user", "content": "Hi"}], "meta": 5}, "line 2: meta must be an object, not 5"),
        ({"messages": [{"role": "user", "content": None}]}, "line 2: a message needs a role and a string"),
        ({"messages": ["Hi"]}, "line 2: a message needs a role and a string"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "line 2: the assistant speaks first"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "line 2: only the system speaks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", conversation("a", "b"), line)
    with pytest.raises(UserError) as error:
        read_conversations(path)
    assert str(error.value).startswith(f"{path} {message}")


def test_missing_empty_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        read_conversations(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"empty\.jsonl: contains no conversation"):
        read_conversations(write(tmp_path / "empty.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.jsonl are not UTF-8"):
        read_conversations(str(tmp_path / "binary.jsonl"))


def test_a_dataset_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "chats"
    folder.mkdir()
    write(folder / "train.jsonl", conversation("a", "b", kind="x"), conversation("c", "d", kind="x"))
    write(folder / "test.jsonl", conversation("e", "f", kind="x"))
    assert [r["messages"][0]["content"] for r in read_conversations(f"hf:{folder}")] == ["a", "c"]
    assert len(read_conversations(f"hf:{folder}", limit=1)) == 1
    assert read_conversations(f"hf:{folder}:test")[0]["messages"][1] == {"role": "assistant", "content": "f"}
    with pytest.raises(UserError, match="dataset hf:.*absent cannot be loaded"):
        read_conversations(f"hf:{folder}:absent")


def test_who_wrote_the_answers() -> None:
    rows = [conversation("a", "b", target="x"), conversation("a", "b"), {"messages": [], "meta": None}]
    assert count_by_model(rows) == {"x": 1, "": 2}


# ------------------------------------------------------------------------------------------------ samples


def test_samples_are_whole_chats_with_their_masks() -> None:
    samples = build_samples([conversation("Hi", "Yo")], make_toy_tokenizer(), 100)
    (sample,) = samples.items
    assert (samples.dropped, samples.truncated, sample.row) == ({}, 0, 0)
    assert sample.ids.tolist() == tokenize(make_toy_tokenizer(), PROMPT + "Yo<|im_end|>\n")
    assert sample.supervised.tolist() == [False] * PROMPT_TOKENS + [True] * 3 + [False]
    assert (sample.ids.dtype, sample.supervised.dtype) == (torch.int64, torch.bool)


def test_an_answer_that_hit_the_cap_has_no_supervised_end() -> None:
    samples = build_samples([conversation("Hi", "Yo", finish="length")], make_toy_tokenizer(), 100)
    assert samples.items[0].supervised.tolist() == [False] * PROMPT_TOKENS + [True] * 2 + [False] * 2


def test_what_cannot_be_used_is_dropped_and_counted() -> None:
    rows = [
        conversation("Hi"),
        conversation("Hi", " \n"),
        conversation("Hi" * 40, "Yo"),
        conversation("Hi", "Yo"),
        conversation("Hi", "Yo" * 40),
    ]
    samples = build_samples(rows, make_toy_tokenizer(), PROMPT_TOKENS + 4)
    assert samples.dropped == {"no assistant turn": 1, "empty answer": 1, "too long": 1}
    assert [sample.row for sample in samples.items] == [3, 4]
    assert (samples.truncated, len(samples.items[1].ids)) == (1, PROMPT_TOKENS + 4)


def test_a_row_that_the_template_refuses_is_counted() -> None:
    tokenizer = make_toy_tokenizer()
    check = "{% if messages[0]['content'] == 'No' %}{{ raise_exception('not that') }}{% endif %}"
    tokenizer.chat_template = check + str(tokenizer.chat_template)
    samples = build_samples([conversation("No", "Yo"), conversation("Hi", "Yo")], tokenizer, 100)
    assert samples.dropped == {"refused by the chat template": 1}
    with pytest.raises(UserError, match="1 refused by the chat template; .*not that"):
        build_samples([conversation("No", "Yo")], tokenizer, 100)


def test_no_usable_sample_is_an_error_that_says_why() -> None:
    with pytest.raises(UserError, match=r"none of 2 .* 1 too long, 1 no .*; raise data.max_length, which is 20"):
        build_samples([conversation("Hi", "Yo"), conversation("Hi")], make_toy_tokenizer(), 20)


@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_is_a_partition(count: int, share: float, seed: int) -> None:
    samples = [make_sample(2, row) for row in range(count)]
    training, held = split_validation(samples, share, seed)
    assert sorted(s.row for s in training + held) == list(range(count))
    assert [s.row for s in training] == sorted(s.row for s in training)
    assert training, "something must be left to train on"
    assert len(held) == (0 if share == 0 else min(count - 1, max(1, round(share * count))))
    assert split_validation(samples, share, seed) == (training, held)


# ------------------------------------------------------------------------------------------------ batches


def test_packing_by_hand() -> None:
    batch = collate([make_sample(5, 7, 10), make_sample(6, 8, 20), make_sample(3, 9, 30)], 8)
    assert batch.ids.tolist() == [[10, 11, 12, 13, 14, 30, 31, 32], [20, 21, 22, 23, 24, 25, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert batch.document.tolist() == [[0] * 5 + [1] * 3, [0] * 6 + [-1] * 2]
    assert batch.supervised.int().tolist() == [[0, 1, 1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0]]
    assert batch.rows == [7, 8, 9]


def test_a_batch_is_no_wider_than_its_longest_row() -> None:
    assert collate([make_sample(5)], 512).ids.shape == (1, 5)
    with pytest.raises(ValueError, match="conversation 3 has 9 tokens"):
        collate([make_sample(9, 3)], 8)


@given(lengths, st.integers(12, 24))
def test_packing_loses_and_invents_nothing(sizes: list[int], max_length: int) -> None:
    samples = [make_sample(size, row, 100 * (row + 1)) for row, size in enumerate(sizes)]
    batch = collate(samples, max_length)
    assert batch.ids.shape[1] <= max_length and batch.rows == list(range(len(sizes)))
    found = {}
    for row in range(batch.ids.shape[0]):
        number = 0
        for number in range(int(batch.document[row].max()) + 1):
            place = batch.document[row] == number
            ids = batch.ids[row][place]
            found[int(ids[0]) // 100 - 1] = ids.tolist()
            assert batch.positions[row][place].tolist() == list(range(len(ids)))
            assert batch.supervised[row][place].tolist() == [i > 0 for i in range(len(ids))]
        padding = batch.document[row] == -1
        assert not batch.supervised[row][padding].any() and not batch.ids[row][padding].any()
    assert [found[i] for i in range(len(sizes))] == [s.ids.tolist() for s in samples]


@given(lengths)
def test_packing_is_first_fit(sizes: list[int]) -> None:
    """No sample stands in a row while an earlier row had room for it when it came."""
    rows: list[int] = []
    for size in sizes:
        fitting = [i for i, used in enumerate(rows) if used + size <= 12]
        if fitting:
            rows[fitting[0]] += size
        else:
            rows.append(size)
    batch = collate([make_sample(size) for size in sizes], 12)
    assert (batch.document >= 0).sum(1).tolist() == rows


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_steps_are_epochs_laid_end_to_end(count: int, per_step: int, seed: int) -> None:
    steps = 3 * count // per_step + 1
    order = [index for step in range(steps) for index in plan_step(count, per_step, seed, step)]
    assert len(order) == steps * per_step
    for epoch in range(len(order) // count):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_plans_depend_on_seed_and_epoch() -> None:
    assert plan_step(50, 50, 0, 0) == plan_step(50, 50, 0, 0)
    assert plan_step(50, 50, 0, 0) != plan_step(50, 50, 1, 0)
    assert plan_step(50, 50, 0, 0) != plan_step(50, 50, 0, 1)
