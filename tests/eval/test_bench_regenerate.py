"""The benchmark of writing data: its arithmetic on runs made by hand, then the script on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import bench_regenerate as bench
from spechead.errors import UserError
from spechead.target.model import Target
from tests.helpers.targets import make_target


def runs(*speeds: float, answers: list[list[int]] | None = None) -> list[bench.Run]:
    answers = answers or [[5, 6, 7, 2], [8] * 6]
    return [bench.Run(answers, 10 / speed) for speed in speeds]


def test_speeds_and_ratios_are_medians_over_the_runs() -> None:
    found = bench.numbers(
        {
            bench.OURS: runs(10, 20, 12),
            bench.GENERATE: runs(5, 5, 6),
            bench.GENERATE_OURS: runs(10, 5, 10, answers=[[5, 6, 7, 2], [9] * 6]),
        }
    )
    speeds = {name: row["tokens_per_second"] for name, row in found["writers"].items()}
    assert speeds == {bench.OURS: 12, bench.GENERATE: 5, bench.GENERATE_OURS: 10}
    assert found["over"] == {bench.GENERATE: 2, bench.GENERATE_OURS: pytest.approx(1.2)}  # of 2, 4, 2; of 1, 4, 1.2
    assert found["over_generate"] == pytest.approx(1.2), "the faster generate"
    assert [row["texts_as_generate"] for row in found["writers"].values()] == [2, 2, 1]
    assert [row["tokens"] for row in found["writers"].values()] == [10, 10, 10]


def test_tokens_after_the_end_do_not_count() -> None:
    assert bench.ended([5, 6, 2, 0, 0], frozenset({2, 9})) == [5, 6, 2]
    assert bench.ended([5, 6], frozenset({2})) == [5, 6] and bench.ended([], frozenset({2})) == []


def test_all_writers_write_the_same(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5], [7, 8, 9, 10, 11], [20, 30, 40], [12] * 20, [50, 51]]
    first = bench.write(target, 2, prompts, 9)
    monkeypatch.setattr(target, "eos_ids", frozenset({first[1][3], first[3][5]}))
    found = {name: writer(prompts, 9) for name, writer in bench.writers(target, 2).items()}
    assert found[bench.OURS] == found[bench.GENERATE] == found[bench.GENERATE_OURS]
    lengths = [len(answer) for answer in found[bench.OURS]]
    assert max(lengths) == 9 and min(lengths) < 9


def test_writers_take_turns_in_a_rotating_order_after_a_warm_up(target: Target) -> None:
    calls: list[tuple[str, int, int]] = []

    def writer(name: str) -> bench.Writer:
        def write(prompts: object, cap: int) -> list[list[int]]:
            calls.append((name, len(list(prompts)), cap))  # type: ignore[call-overload]
            return [[5]]

        return write

    options = bench.RegenerateBenchOptions(batch_size=2, max_new_tokens=30, repeats=3)
    found = bench.measure(target, {name: writer(name) for name in "abc"}, [[1]] * 5, options)
    assert calls[:3] == [(name, 2, bench.WARM_UP_TOKENS) for name in "abc"]
    assert "".join(name for name, _, _ in calls[3:]) == "abcbcacab"
    assert {call[1:] for call in calls[3:]} == {(5, 30)} and [len(some) for some in found.values()] == [3, 3, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and prompts."""
    root = tmp_path_factory.mktemp("bench")
    target = make_target()
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("ab", "x y", "abc")))
    return root


def test_the_script_writes_and_prints_every_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    arguments = ["--target", "target", "--prompts", "prompts.jsonl", "--device", "cpu", "--dtype", "float32"]
    small = ["--count", "3", "--batch-size", "2", "--max-new-tokens", "6", "--repeats", "1"]
    bench.main([*arguments, *small, "--json", "out/bench.json"])
    found = json.loads((folder / "out" / "bench.json").read_text())
    for row in found["writers"].values():
        assert row["tokens_per_second"] > 0 and row["tokens"] == 18 and row["texts_as_generate"] == 3
    assert 0 < found["over_generate"] == min(found["over"].values())
    assert found["settings"]["batch_size"] == 2 and found["machine"]["device"] == "cpu" and found["prompts"] == 3
    text = capsys.readouterr().out
    assert "3/3" in text and "times generate" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--count", "9"], "option count: there are only 3 prompts, got 9"),
        (["--count", "3", "--json", "."], r"option json: \. is a folder"),
        (["--count", "3", "--max-new-tokens", "250"], "option max_new_tokens: .* exceeds the 256 positions"),
    ],
)
def test_impossible_settings_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        bench.main(["--target", "target", "--prompts", "prompts.jsonl", "--device", "cpu", *changes])


def test_without_a_file_the_prompts_are_specheads_own() -> None:
    texts = bench.read_texts(bench.RegenerateBenchOptions())
    assert len(texts) == len(set(texts)) == 48
