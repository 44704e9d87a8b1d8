"""What `data inspect` shows and counts."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from spechead.data import inspect as module
from spechead.data.dataset import Sample
from spechead.data.inspect import InspectOptions, evenly_spaced, inspect
from spechead.errors import UserError
from tests.helpers.targets import make_target


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target = make_target()
    monkeypatch.setattr(module, "load_tokenizer", lambda name, **_: target.tokenizer)
    ids = target.tokenizer.convert_ids_to_tokens
    monkeypatch.setattr(target.tokenizer, "decode", lambda tokens, **_: "".join(ids(tokens)))
    answers = ["Yo", "Yes [bold]", "", "Fine" * 30]
    rows: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}],
            "meta": {"kind": "coding" if i else "maths", "finish": "eos", "target": "tiny-llama"},
        }
        for i, answer in enumerate(answers)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(options: InspectOptions, *, terminal: bool = False) -> tuple[str, dict[str, Any]]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="256" if terminal else None, width=200)
    counts = inspect(options, console)
    return out.getvalue(), counts


def test_supervised_runs_stand_in_brackets_where_there_is_no_terminal(file: Path) -> None:
    text, _ = shown(InspectOptions(file=str(file), max_length=60, show=2))
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n" in text
    assert "⟦Yes [bold]<|im_end|>⟧" in text, "text of the data is not markup"
    assert "conversation 0, maths" in text and "\x1b" not in text


def test_supervised_runs_are_coloured_on_a_terminal(file: Path) -> None:
    text, _ = shown(InspectOptions(file=str(file), max_length=60, show=1), terminal=True)
    assert "⟦" not in text and "mYo<|im_end|>\x1b[0m" in text


def test_counts(file: Path) -> None:
    text, counts = shown(InspectOptions(file=str(file), max_length=60, show=0))
    prompt = 21
    assert counts == {
        "conversations": 4,
        "usable": 3,
        "truncated": 1,
        "tokens": prompt + 4 + prompt + 12 + 60,
        "supervised tokens": 3 + 11 + 39,
        "longest": 60,
        "kinds": {"coding": 2, "maths": 1},
        "written by": {"tiny-llama": 4},
        "dropped": {"empty answer": 1},
    }
    assert "empty answer" in text and "supervised tokens" in text


def test_a_file_of_which_nothing_can_be_used_is_an_error(file: Path) -> None:
    with pytest.raises(UserError, match="none of 4 conversations can be used: 3 too long, 1 empty answer"):
        shown(InspectOptions(file=str(file), max_length=10))
    with pytest.raises(UserError, match="option max_length: must be at least 1, got 0"):
        shown(InspectOptions(file=str(file), max_length=0))


def test_samples_are_evenly_spaced_over_the_file() -> None:
    samples = [Sample(torch.zeros(1), torch.zeros(1), row) for row in range(10)]
    assert [sample.row for sample in evenly_spaced(samples, 3)] == [0, 3, 6]
    assert [sample.row for sample in evenly_spaced(samples[:2], 5)] == [0, 1]
    assert evenly_spaced([], 2) == []
