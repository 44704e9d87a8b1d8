"""The model card of an export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spechead.formats.export import write_export
from spechead.formats.registry import FORMATS
from tests.helpers.exporting import export_info, make_head, run, tiny


@pytest.mark.parametrize("form", FORMATS)
def test_no_path_of_this_machine_is_written(form: str, tmp_path: Path) -> None:
    name = "medusa" if form in ("medusa", "tgi") else "eagle3"
    out = tmp_path / "somewhere" / "out"
    meta = {"data": [str(tmp_path / "mine.jsonl")], "steps": 7}
    write_export(make_head(name, tiny("llama")), form, out, export_info(tiny("llama"), tmp_path), meta)
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
    card = (out / "README.md").read_text()
    assert "base_model: org/model" in card and "mine.jsonl" in card and FORMATS[form].SERVER in card


MEASURED = {
    "tree": "chain:3",
    "prompts": 40,
    "acceptance_length": 1.9,
    "acceptance_length_ci": [1.75, 2.03],
    "speedup": 1.3,
    "speedup_ci": [1.2, 1.37],
    "plain_tokens_per_s": 44.1,
    "speculative_tokens_per_s": 57.1,
    "rule": "exact_match",
    "lossy": False,
    "lossless": {"equal": 40, "checked": 40},
}


def write_report(path: Path, head: Path | str, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    suites = {"held_out": MEASURED | changes}
    report = {"head": str(head), "dtype": "float32", "machine": {"processor": "EPYC"}, "suites": suites}
    path.write_text(json.dumps(report))
    return path


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_card_shows_the_report(tiny_run: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", tiny_run / "eagle3")
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'} --report {report}")
    card = card_of(tmp_path / "out")
    assert "| chain:3 | 1.90 [1.75, 2.03] | x1.30 [1.20, 1.37] | 44.1 -> 57.1 | 40/40 |" in card
    assert "LOSSY" not in card and "(lossy)" not in card


def test_numbers_of_a_lossy_rule_are_marked(tiny_run: Path, tmp_path: Path) -> None:
    lossy = {"rule": "typical", "lossy": True, "lossless": {"equal": 0, "checked": 0}}
    report = write_report(tmp_path / "report.json", tiny_run / "eagle3", **lossy)
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'} --report {report}")
    card = card_of(tmp_path / "out")
    assert "| chain:3 (lossy) | 1.90" in card and "| lossy |" in card and "0/0" not in card
    assert "**LOSSY: under the rule typical the text does not follow the target's distribution.**" in card


def test_the_report_is_that_of_the_head(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's later head lies beside its final one, and only the final one's report lies in RUN/eval."""
    final, early = tmp_path / "run" / "head", tmp_path / "run" / "head-step-500"
    for head in (final, early):
        shutil.copytree(tiny_run / "medusa", head)
    report = write_report(tmp_path / "run" / "eval" / "report.json", final)
    for head, shown in ((final, True), (early, False)):
        run(f"export --head {head} --to vllm -o {tmp_path / 'out'}")
        assert ("| chain:3 |" in card_of(tmp_path / "out")) is shown
        assert "shows no report" not in capsys.readouterr().err
    write_report(early / "eval" / "report.json", early, tree="chain:2")
    run(f"export --head {early} --to vllm -o {tmp_path / 'out'}")
    assert "| chain:2 |" in card_of(tmp_path / "out")

    write_report(early / "eval" / "report.json", final)
    run(f"export --head {early} --to vllm -o {tmp_path / 'out'}")
    assert f"report.json measures the head {final}, not {early}" in capsys.readouterr().err
    assert "Not measured" in card_of(tmp_path / "out")
    for path, message in ((report, f"the head {final}"), (write_report(tmp_path / "none.json", ""), "no head")):
        with pytest.raises(SystemExit):
            run(f"export --head {early} --to vllm -o {tmp_path / 'x'} --report {path}")
        assert f"option report: {path} measures {message}, not {early}; measure this one" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
