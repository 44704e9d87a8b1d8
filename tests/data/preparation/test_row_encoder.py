"""What becomes of a row: samples that fit the target, or a reason; and which process sees to it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spechead.data.preparation import row_encoder as module
from spechead.data.preparation.row_encoder import CHUNK_ROWS, Outcome, RowEncoder, chunks, outcomes
from spechead.data.preparation.settings import Preparation, Task
from spechead.data.sources import Row
from spechead.target.chat_template import ChatTemplate
from tests.helpers.targets import make_toy_tokenizer

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = 1 + 5 + 2 + 1 + 1 + 1 + 10
FORGETS = (  # what the assistant said before the last user's message is dropped
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.index0 >= messages | length - 1 %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_row(*contents: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, **more}


def encoded(row: Any, length: int = 200, vocab_size: int = 97, history: str = "each", template: str = "") -> Outcome:
    chat = ChatTemplate(make_toy_tokenizer(), template)
    value = row if isinstance(row, bytes) else json.dumps(row).encode()
    return RowEncoder(chat, length, history, vocab_size).encode(Task(5, 1, 2, Row("f line 6", value)))


def test_a_chat_is_a_sample_with_its_mask() -> None:
    outcome = encoded(chat_row("Hi", "Yo", meta={"kind": "k", "target": "m"}))
    (ids, supervised), tokenizer = outcome.samples[0], make_toy_tokenizer()
    text = PROMPT + "Yo<|im_end|>"
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"] and ids.dtype == np.int32
    assert supervised.tolist() == [False] * PROMPT_TOKENS + [True] * 3 and supervised.dtype == np.bool_
    assert (outcome.number, outcome.source, outcome.repeats, outcome.where) == (5, 1, 2, "f line 6")
    assert (outcome.reason, outcome.truncated, outcome.parsed) == ("", 0, True)
    assert (outcome.kind, outcome.writer, outcome.replaced) == ("k", "m", 0)


def test_an_answer_is_cut_at_the_length() -> None:
    outcome = encoded(chat_row("Hi", "Yo" * 40), PROMPT_TOKENS + 4)
    assert [len(ids) for ids, _ in outcome.samples] == [PROMPT_TOKENS + 4] and outcome.truncated == 1


@pytest.mark.parametrize(
    ("row", "length", "vocab_size", "reason", "detail"),
    [
        (chat_row("Hi"), 200, 97, "no assistant turn", ""),
        (chat_row("Hi", " \n"), 200, 97, "empty answer", ""),
        (b"{", 200, 97, "not valid JSON", "Expecting"),
        (chat_row("Hi" * 40, "Yo"), 60, 97, "too long", ""),
        (chat_row("Hi", "Yo"), PROMPT_TOKENS, 97, "too long", ""),
        ({"text": "a"}, 200, 97, "too short", ""),
        (chat_row("Hi", "Yo"), 200, 60, "ids beyond the embedding's rows", "of 60 rows"),
        (chat_row("Hi", "Yo", answer_ids=[[99]]), 200, 97, "", ""),  # no ids of the tokenizer: not taken
    ],
)
def test_a_row_that_cannot_be_used_has_a_reason(
    row: Any, length: int, vocab_size: int, reason: str, detail: str
) -> None:
    outcome = encoded(row, length, vocab_size)
    assert outcome.reason == reason and detail in outcome.detail
    assert bool(outcome.samples) == (not reason)


def test_ids_beyond_the_cut_do_not_matter() -> None:
    assert encoded(chat_row("Hi", "##~"), 200, 95).reason == "ids beyond the embedding's rows"
    assert not encoded(chat_row("Hi", "##~"), PROMPT_TOKENS + 2, 97).reason


def test_a_row_is_used_in_part() -> None:
    """A turn that has a sample of its own may not fit where others do."""
    outcome = encoded(chat_row("Hi", "Yo", "And" * 20, "No"), 50, template=FORGETS)
    assert [len(ids) for ids, _ in outcome.samples] == [PROMPT_TOKENS + 3]
    assert outcome.notes["samples left out: too long"] == 1 and not outcome.reason
    whole = encoded(chat_row("Hi", "Yo", "And", "No"), template=FORGETS)
    assert len(whole.samples) == 2
    assert len(encoded(chat_row("Hi", "Yo", "And", "No"), template=FORGETS, history="last").samples) == 1


def test_notes_are_of_rows_that_are_used() -> None:
    outcome = encoded(chat_row("Hi" * 30, "Yo", "And" * 20, "No"), 50, template=FORGETS)
    assert outcome.reason == "too long" and not outcome.notes and not outcome.samples


# ------------------------------------------------------------------------------------------------ processes


def test_an_encoder_passes_to_a_process_that_is_started_anew() -> None:
    encoder = RowEncoder(chat_of_toy(), 60, "each", 97)
    tasks = [Task(0, 0, 1, Row("", json.dumps(chat_row("Hi", "Yo")).encode()))]
    [here] = encoder(tasks)  # fills what is cached in it
    [there] = pickle.loads(pickle.dumps(encoder))(tasks)
    assert here.samples[0][0].tolist() == there.samples[0][0].tolist() and there.samples[0][1].sum() == 3


def chat_of_toy() -> ChatTemplate:
    return ChatTemplate(make_toy_tokenizer())


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_chunks_are_bounded_in_rows_and_bytes() -> None:
    def task(value: Any) -> Task:
        return Task(0, 0, 1, Row("", value))

    small = [len(chunk) for chunk in chunks(task(b"x") for _ in range(130))]
    assert small == [CHUNK_ROWS, CHUNK_ROWS, 2]
    assert [len(chunk) for chunk in chunks(task(b"x" * module.CHUNK_BYTES) for _ in range(3))] == [1, 1, 1]
    assert list(chunks([])) == []


def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat_row("Hi", "" if i % 7 == 3 else f"{i}" * (1 + i % 5)) for i in range(300)]
    source = write(tmp_path / "a.jsonl", rows)
    found = {}
    for small, workers in ((1000, 2), (0, 2), (0, 1)):
        monkeypatch.setattr(module, "SMALL_ROWS", small)
        preparation = Preparation([source], ChatTemplate(make_toy_tokenizer()), 60, vocab_size=97, workers=workers)
        results = list(outcomes(preparation))
        found[small, workers] = [
            (one.where, one.reason, [(ids.tolist(), mask.tolist()) for ids, mask in one.samples]) for one in results
        ]
    assert found[1000, 2] == found[0, 2] == found[0, 1]
    assert [where for where, *_ in found[0, 2]] == [f"{source} line {i + 1}" for i in range(300)]


def test_only_large_data_start_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0

    def counted(function: Any, items: Any, workers: int) -> Any:
        nonlocal started
        started = workers
        yield from map(function, items)

    monkeypatch.setattr(module, "map_in_order", counted)
    monkeypatch.setattr(module, "SMALL_ROWS", 10)
    chat = ChatTemplate(make_toy_tokenizer())
    long = chat_row("Hi", "Yo" * 100)
    for rows, workers, expected in ((10, 3, 0), (11, 3, 3), (80, 1, 0), (80, 0, min(module.cores(), 99) % 99)):
        started = 0
        source = write(tmp_path / "a.jsonl", [long] * rows)
        assert len(list(outcomes(Preparation([source], chat, 60, workers=workers)))) == rows
        assert started == (expected if expected != 1 else 0)
    started = 0
    monkeypatch.setattr(module, "SMALL_BYTES", 1000)
    list(outcomes(Preparation([write(tmp_path / "a.jsonl", [long] * 9)], chat, 60, workers=2)))
    assert started == 2 and os.getpid()
