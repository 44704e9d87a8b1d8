"""What `data inspect` shows and counts."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spechead.data.inspect import InspectOptions, evenly_spaced, inspect
from spechead.data.preparation import prepare
from spechead.data.preparation.prepare import SampleOptions
from spechead.errors import UserError
from tests.helpers.targets import make_target


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target = make_target()
    monkeypatch.setattr(SampleOptions, "load_chat", lambda _: target.chat)
    monkeypatch.setattr(prepare, "load_limits", lambda *_, **__: (target.vocab_size, target.max_positions))
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
    assert f"{file} line 1, maths" in text and "\x1b" not in text


def test_supervised_runs_are_coloured_on_a_terminal(file: Path) -> None:
    text, _ = shown(InspectOptions(file=str(file), max_length=60, show=1), terminal=True)
    assert "⟦" not in text and "mYo<|im_end|>\x1b[0m" in text


def test_counts(file: Path) -> None:
    text, counts = shown(InspectOptions(file=str(file), max_length=60, show=0))
    prompt = 21
    assert counts == {
        "conversations": 4,
        "usable": 3,
        "samples": 3,
        "truncated": 1,
        "tokens": prompt + 3 + prompt + 11 + 60,
        "supervised tokens": 3 + 11 + 39,
        "longest": 60,
        "surrogates replaced": 0,
        "kinds": {"coding": 2, "maths": 1},
        "written by": {"tiny-llama": 3},
        "noticed": {},
        "dropped": {"empty answer": 1},
    }
    assert "supervised tokens" in text and text.splitlines()[-1].strip() == f"empty answer: {file} line 3"


def test_a_prepared_set_is_inspected_like_its_source(file: Path, tmp_path: Path) -> None:
    options = InspectOptions(file=str(file), max_length=600, show=2)
    text, counts = shown(options)
    prepare.prepare(options.preparation([str(file)]), tmp_path / "set")
    again, same = shown(InspectOptions(file=str(tmp_path / "set"), max_length=20, show=2))
    cut = "samples are cut at the target's 256 positions, below max_length 600\n"
    assert same == counts and cut in text and again == text.replace(cut, "")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"prompt": "Hi", "response": "Yo"},
        {"instruction": "Hi", "output": "Yo"},
    ],
)
def test_every_layout_is_inspected(file: Path, row: dict[str, Any]) -> None:
    file.write_text(json.dumps([row]))
    text, _ = shown(InspectOptions(file=str(file.rename(file.with_suffix(".json")))))
    assert "user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧" in text and "row 1, no kind" in text


def test_a_file_of_which_nothing_can_be_used_is_an_error(file: Path) -> None:
    with pytest.raises(UserError, match="none of 4 conversations can be used: 3 too long, 1 empty answer"):
        shown(InspectOptions(file=str(file), max_length=10))
    with pytest.raises(UserError, match="option max_length: must be at least 1, got 0"):
        shown(InspectOptions(file=str(file), max_length=0))


def test_samples_are_evenly_spaced_over_the_file() -> None:
    assert evenly_spaced(10, 3) == [0, 3, 6] and evenly_spaced(2, 5) == [0, 1] and evenly_spaced(0, 2) == []
