"""Training runs of a tiny target for the tests, in this process and in others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from spechead.training.checkpoints import list_checkpoints
from spechead.training.distributed import free_port
from spechead.training.recipe import Recipe, load_recipe
from tests.helpers.targets import make_target

ROOT = Path(__file__).parents[2]
# Set by training in this process
RENDEZVOUS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SMALL: dict[str, dict[str, Any]] = {
    "eagle": {"draft_vocab_size": 64, "steps": 2},
    "eagle3": {"draft_vocab_size": 64, "steps": 2},
    "hydra": {"draft_vocab_size": 64, "n_heads": 2, "prefix": True, "dropout": 0.1},
    "medusa": {"draft_vocab_size": 64, "n_heads": 2},
}


def write_tiny(root: Path) -> Path:
    """A saved tiny target and 12 conversations in `root`."""
    target = make_target("llama")
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "the answer " + "ab cd " * (1 + i % 4)},
            ],
            "meta": {"target": str(root / "target")},
        }
        for i in range(12)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def flags(folder: Path, out: Path, kind: str = "eagle3", /, **changes: Any) -> list[str]:
    """Eight steps on what `write_tiny` wrote, with checkpoints after the third, the sixth and the last."""
    options: dict[str, Any] = {
        "target.name": folder / "target",
        "data.train": folder / "data.jsonl",
        "data.validation_share": 0.2,
        "head.kind": kind,
        **{f"head.options.{name}": value for name, value in SMALL.get(kind, {"draft_vocab_size": 64}).items()},
        "optim.batch_size": 4,
        "optim.micro_batch_size": 2,
        "optim.steps": 8,
        "optim.lr": 0.003,
        "engine.precision": "float32",
        "log.every": 1,
        "log.checkpoint_every": 3,
        "log.validate_every": 4,
        "out": out,
    } | changes
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def recipe(folder: Path, out: Path, kind: str = "eagle3", /, **changes: Any) -> Recipe:
    return load_recipe("", flags(folder, out, kind, **changes))


def launch(words: list[str], processes: int = 0) -> subprocess.Popen[str]:
    """Train in another process, or in `processes` of torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(free_port())]
    command = [sys.executable, *(torchrun if processes else []), "-m", "spechead", "train"]
    inherited = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    environment = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command + words,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill_after_a_checkpoint(words: list[str], out: Path) -> None:
    """Train in another process, and kill it once `out` has a checkpoint."""
    process = launch(words)
    deadline = time.monotonic() + 120
    while not list_checkpoints(out / "checkpoints") and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert list_checkpoints(out / "checkpoints"), output


def files(head: Path) -> dict[str, bytes]:
    """The bytes of a head's files, by name."""
    return {path.name: path.read_bytes() for path in head.iterdir()}


def weights(out: Path) -> dict[str, Tensor]:
    """The tensors of the head that the run in `out` wrote."""
    return load_file(out / "head" / "model.safetensors")
