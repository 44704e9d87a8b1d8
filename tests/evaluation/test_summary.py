"""`spechead summary`: the main figures, the files that exist, the next command."""

import json
from pathlib import Path
from typing import Any

import pytest

from spechead.errors import UserError
from spechead.evaluation.summary import SummaryOptions, summary


def suite(**changes: Any) -> dict[str, Any]:
    figures = {
        "acceptance_length": 2.4,
        "acceptance_length_ci": [2.2, 2.5],
        "speedup": 1.414,
        "speedup_ci": [1.3, 1.5],
        "plain_tokens_per_s": 12.34,
        "speculative_tokens_per_s": 17.5,
        "lossless": {"checked": 40, "equal": 40, "divergences": []},
    }
    return figures | changes


def run_with(folder: Path, report: Any) -> Path:
    for name in ("head", "eval"):
        (folder / name).mkdir()
    (folder / "eval" / "report.json").write_text(json.dumps(report))
    (folder / "training_curve.png").touch()
    return folder


def report(suites: dict[str, Any]) -> dict[str, Any]:
    about = {"schema": 1, "kind": "eagle3", "target": "smollm2-135m", "dtype": "float32", "device": "cpu"}
    return about | {"suites": suites}


def test_figures_paths_and_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path, report({"held_out": suite(), "held_out/coding": suite(acceptance_length=9.99)}))
    summary(SummaryOptions(str(run)))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "eagle3 head on smollm2-135m, float32 on cpu" in lines
    assert "acceptance length [95 %] 2.40 [2.20, 2.50]" in lines
    assert "speed-up [95 %] x1.41 [1.30, 1.50]" in lines
    assert "tokens per second 17.5, plain decoding 12.3" in lines
    assert "text identical to plain decoding 40/40 prompts" in lines
    assert f"head {run}/head" in lines
    assert f"report as JSON {run}/eval/report.json" in lines
    assert f"training curve {run}/training_curve.png" in lines
    assert not any(line.startswith("report ") and line.endswith(".html") for line in lines), "it does not exist"
    assert lines[-1] == f'try it: spechead generate --head {run}/head --prompt "Explain why the sky is blue."'
    assert "9.99" not in " ".join(lines), "kinds belong into the report"


def test_a_column_for_each_tree_and_missing_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = suite(speedup=None, speedup_ci=None, acceptance_length=None, acceptance_length_ci=None)
    summary(SummaryOptions(str(run_with(tmp_path, report({"x": suite(), "x@chain:3": nothing})))))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "x x@chain:3" in lines
    assert "speed-up [95 %] x1.41 [1.30, 1.50] -" in lines


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"option run: no report at .*; first run spechead eval --head .*/head --out .*/eval"
    ):
        summary(SummaryOptions(str(tmp_path)))
    run_with(tmp_path, {"schema": 2})
    with pytest.raises(UserError, match="report.json: not a report of schema 1"):
        summary(SummaryOptions(str(tmp_path)))
