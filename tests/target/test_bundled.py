"""The whole path on the bundled target: torchrun, DeepSpeed, a saved head, losslessness with every kind of tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spechead.evaluation.evaluate import EvalOptions, evaluate
from spechead.heads import HEADS

ROOT = Path(__file__).parents[2]
TREES = ["chain:3", "static:[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0]]", "dynamic:nodes=30,depth=4,topk=4"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_train_save_and_decode_losslessly(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    words = ["recipes/train.py", "--config", f"{kind}-smollm2", "--out", str(run)]
    limits = ["--optim.steps", "12", "--data.limit", "40", "--log.validate_every", "0", "--log.every", "4"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run(
        launcher + words + limits, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    options = EvalOptions(
        head=str(run / "head"), tree=TREES, limit=4, max_new_tokens=32, generate_prompts=2, out=str(run / "eval")
    )
    report = evaluate(options)
    assert json.loads((run / "eval" / "report.json").read_text())["schema"] == 1
    for name, suite in report["suites"].items():
        assert suite["lossless"]["equal"] == suite["lossless"]["checked"] > 0, name
        assert suite["acceptance_length"] >= 1.0
    assert (run / "eval" / "report.html").stat().st_size > 10_000
