"""The benchmark of the loss's memory, at a size at which logits decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import bench_loss


@pytest.mark.slow
def test_logits_made_a_few_at_a_time_take_less_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    bench_loss.main(["--lengths", "[512]", "--hidden_size", "64", "--json", str(out)])
    found = json.loads(out.read_text())
    at_once, in_parts = found["peak_mb"]["all at once"]["512"], found["peak_mb"]["some rows at a time"]["512"]
    assert at_once > 1.5 * in_parts > 0
    assert found["settings"]["lengths"] == [512] and found["logits_at_once"] > 0
    assert f"{at_once:.0f}" in capsys.readouterr().out
