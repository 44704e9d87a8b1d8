"""The ablation script: on a tiny target, started again, and its unshifted loss mask."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import ablate
from spechead.cli.main import one_line_errors
from spechead.data.dataset import Sample
from tests.helpers import targets
from tests.helpers.training import write_tiny


def test_variants_are_trained_once_and_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(targets.BASE, "num_hidden_layers", 30)  # as many as the base needs for its taps
    root = write_tiny(tmp_path)
    recipe = {"target": {"name": str(root / "target")}, "data": {"train": str(root / "data.jsonl")}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe | {"head": {"kind": "eagle3"}}))
    monkeypatch.setattr(ablate, "BASE", [*ablate.BASE, "--head.options.draft_vocab_size", "16"])

    def start(*more: str) -> dict[str, Any]:
        words = ["ablate.py", "--config", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "out.json"), *more]
        monkeypatch.setattr(sys, "argv", words)
        with one_line_errors():
            ablate.main()
        return dict(json.loads((tmp_path / "out.json").read_text()))

    names = ["the base", "1 unrolled step", ablate.UNSHIFTED]
    result = start("--steps", "3", "--only", *names)
    assert list(result["variants"]) == names and result["variants"]["the base"]["acceptance_length"] >= 1
    assert all("accuracy@3" in variant and "accuracy@4" not in variant for variant in result["variants"].values())
    assert result["variants"]["the base"]["loss"] != result["variants"][ablate.UNSHIFTED]["loss"]
    monkeypatch.setattr(ablate, "fit", lambda *_: pytest.fail("trained again"))
    assert start("--steps", "3", "--only", "the base") == result, "earlier variants stay"
    with pytest.raises(SystemExit) as end:
        start("--steps", "4", "--only", "the base")
    assert (
        end.value.code == 2
        and "out.json has variants with steps = 3, now 4: choose another file" in capsys.readouterr().err
    )
    monkeypatch.setitem(ablate.VARIANTS, "1 unrolled step", ["--head.options.steps", "2"])
    with pytest.raises(SystemExit) as end:
        start("--steps", "3", "--only", "the base")
    assert end.value.code == 2 and "has variants with 1 unrolled step.flags = [" in capsys.readouterr().err


def test_the_unshifted_mask_is_that_of_the_row() -> None:
    sample = Sample(torch.arange(5), torch.tensor([False, True, True, False, False]), 0)
    assert ablate.unshifted(sample).supervised.tolist() == [False, False, False, True, True]
