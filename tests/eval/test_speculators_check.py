"""The check against the speculators package, with a stand-in that computes drafts from the same files and rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from eval import speculators_check as check
from spechead.formats import reference_forward
from spechead.formats.foreign_head import stored_embedding
from spechead.formats.servers.speculators import load
from spechead.heads.files import save_head
from spechead.target.model import Target
from tests.helpers.exporting import make_head
from tests.helpers.training import write_tiny

RESULT = {"version": "0.9.0", "tensors": 15, "missing": [], "unexpected": []}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tiny(tmp_path_factory.mktemp("run"))
    save_head(make_head("eagle3", Target.load(str(root / "target"), device="cpu", pack=False)), root / "head", {})
    return root


@torch.no_grad()
def answer(options: Any, folder: str) -> dict[str, Any]:
    """As the package does it: draft after the last row that has states, from the written files alone."""
    target, work = Target.load(folder, device="cpu", pack=False), Path(options.work)
    foreign, rows = load(work / "export", target), load_file(work / "inputs.safetensors")
    c, w, found = foreign.config, foreign.tensors, {"ids": torch.arange(40) + foreign.tensors["d2t"]}
    for i, length in enumerate(check.LENGTHS):
        last, ids = length - 2, rows[f"{i}.input_ids"][0]
        embeddings = stored_embedding(target)[ids]
        states = reference_forward._fused(rows[f"{i}.hidden_states"][0, : last + 1].chunk(3, -1), c, w)
        found[str(i)] = torch.zeros(check.DRAFTS, len(ids), 40)
        for k in range(check.DRAFTS):
            out = reference_forward._eagle3_layers(c, w, embeddings[: last + 1 + k], states, target)[-1:]
            states = torch.cat([states, out])
            found[str(i)][k, last] = F.linear(reference_forward._norm(out, w["norm.weight"], c), w["lm_head.weight"])
    save_file(found, work / "outputs.safetensors")
    return RESULT


def lacking(options: Any, folder: str) -> dict[str, Any]:
    return answer(options, folder) | {"missing": ["fc.weight"], "unexpected": ["fc.bias"]}


def drafting_otherwise(options: Any, folder: str) -> dict[str, Any]:
    answer(options, folder)
    path = Path(options.work) / "outputs.safetensors"
    found = load_file(path)
    found["2"][1, check.LENGTHS[2] - 2, 7] += 1
    save_file(found, path)
    return RESULT


def in_other_tokens(options: Any, folder: str) -> dict[str, Any]:
    answer(options, folder)
    path = Path(options.work) / "outputs.safetensors"
    save_file(load_file(path) | {"ids": torch.arange(40)}, path)
    return RESULT


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (answer, "passed"),
        (lacking, "FAILED: missing fc.weight; unexpected fc.bias"),
        (drafting_otherwise, "FAILED: draft 2 differs by "),
        (in_other_tokens, "FAILED: draft 1 differs by "),
    ],
)
def test_differences_are_named(
    package: Callable[[Any, str], dict[str, Any]],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "run_package", package)
    words = ["--speculators", sys.executable, "--head", str(run / "head"), "--work", str(tmp_path)]
    assert check.main(words) == (0 if message == "passed" else 1)
    assert capsys.readouterr().out.splitlines()[-1].startswith(message)


def test_the_package_runs_in_its_own_environment(tmp_path: Path) -> None:
    options = check.ParityOptions(speculators=sys.executable, head="none", work=str(tmp_path))
    assert "No module named 'speculators'" in check.run_package(options, "target")["failed"]
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho a warning\necho '{json.dumps(RESULT)}'\n")
    program.chmod(0o755)
    options.speculators = str(program)
    assert check.run_package(options, "target") == RESULT
    assert "a warning" in (tmp_path / "speculators.log").read_text()
