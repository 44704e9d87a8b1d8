"""Parity with the `speculators` package: an exported EAGLE-3 head, loaded by the package's own class.

    python eval/speculators_check.py --speculators .venv-speculators/bin/python --head HEAD  # `make speculators-check`

The export's tensors must be those that the class has, and its drafts behind a few texts the head's own: log
probabilities in float32 within `TOLERANCE`. Exit code 1, and a line that says what differs, where they are not. Knows
nothing of the package, whose side is speculators_forward.py.

Legend: T tokens of a text, K drafts, V target vocabulary, D draft vocabulary, H hidden size, n rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from spechead.cli.main import one_line_errors
from spechead.errors import UserError
from spechead.files import make_folder, write_text
from spechead.formats.check import drafted
from spechead.formats.export import ExportOptions, export
from spechead.heads import Head
from spechead.heads.files import load_head, read_info
from spechead.options import parse
from spechead.target import bundled
from spechead.target.model import Target

TOLERANCE = 1e-4
LENGTHS = (5, 9, 17)  # of the texts, in tokens
DRAFTS = 3
NEGLIGIBLE = -30.0  # log probability below which float32 says little
LOG = "speculators.log"
THEIRS = Path(__file__).with_name("speculators_forward.py")


@dataclass(kw_only=True)
class CheckOptions:
    """Compare an exported EAGLE-3 head with what the speculators package makes of it."""

    speculators: str
    """Python of an environment with the package."""
    head: str
    """Folder of a trained EAGLE-3 head."""
    work: str = "runs/speculators-check"
    """Folder for the export, and for what both sides computed."""

    def __post_init__(self) -> None:
        if not os.access(self.speculators, os.X_OK):
            raise UserError(f"speculators {self.speculators}: is no program; give the Python of an environment with it")


def main(argv: Sequence[str]) -> int:
    options = parse(CheckOptions, argv, "speculators_check.py")
    work, folder = Path(options.work), Path(options.head)
    make_folder(work)
    name = read_info(folder).target
    known_as = Path(name).name if Path(name).is_dir() else ""
    exporting = ExportOptions(head=options.head, to="speculators", out=str(work / "export"), dtype="float32")
    export(replace(exporting, target_id=known_as))
    target = exporting.load_target(name)
    head = load_head(folder, target, dtype=torch.float32)
    inputs, ours = {}, []
    for i, length in enumerate(LENGTHS):
        text = torch.randint(target.vocab_size, (length,), generator=torch.Generator().manual_seed(i))
        drafts, expected = drafted(head, target, text, DRAFTS)
        inputs[f"{i}.hidden_states"], inputs[f"{i}.input_ids"] = rows(head, target, text, drafts)
        ours.append(expected)
    save_file(inputs, work / "inputs.safetensors")
    said = ask(options, str(bundled.folder()) if name == bundled.NAME else name)
    if "failed" in said:
        print(f"FAILED: the package does not load the export: {said['failed']}; see {work / LOG}")
        return 1
    gaps = compare(ours, load_file(work / "outputs.safetensors"))
    print(f"speculators {said['version']} loads the export, {said['tensors']} tensors")
    print(f"log probabilities of drafts 1 to {DRAFTS} differ by at most {' '.join(f'{gap:.1e}' for gap in gaps)}")
    wrong = [f"{what} {', '.join(said[what])}" for what in ("missing", "unexpected") if said[what]]
    wrong += [f"draft {k} differs by {gap:.1e}" for k, gap in enumerate(gaps, 1) if not gap <= TOLERANCE]
    print(f"FAILED: {'; '.join(wrong)}" if wrong else "passed")
    return 1 if wrong else 0


@torch.no_grad()
def rows(head: Head, target: Target, text: Tensor, drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What the package reads of a text of T tokens and its drafts: tapped states [1, n, taps*H], tokens [1, n].

    Row t has the states of token t and the token behind it. Rows of drafts have no states, and none sees them.
    """
    states = target.model(input_ids=text[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    tapped = torch.cat([states[layer] for layer in head.config.layers], -1)  # [1, T-1, taps*H]
    ahead = torch.tensor(drafts[:-1])
    return F.pad(tapped, (0, 0, 0, len(ahead))).contiguous(), torch.cat([text[1:], ahead])[None]


def compare(ours: Sequence[Tensor], theirs: dict[str, Tensor]) -> list[float]:
    """The largest difference of log probabilities at each depth. `ours`: [K, V] of each text."""
    worst = torch.zeros(DRAFTS)
    for i, (length, expected) in enumerate(zip(LENGTHS, ours, strict=True)):
        small = theirs[str(i)][:, length - 2].log_softmax(-1)  # [K, D], of the last row that has states
        found = torch.full_like(expected, float("-inf")).index_copy(1, theirs["ids"], small)
        worst = worst.max((found.clamp(min=NEGLIGIBLE) - expected.clamp(min=NEGLIGIBLE)).abs().amax(1))
    return [float(gap) for gap in worst]


def ask(options: CheckOptions, target: str) -> dict[str, Any]:
    """What the package's side says, or how it failed. `target`: a folder, or a hub id in the cache."""
    work = Path(options.work)
    words = [work / "export", target, work / "inputs.safetensors", work / "outputs.safetensors", DRAFTS]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [options.speculators, str(THEIRS), *map(str, words)], env=environment, capture_output=True, text=True
    )
    write_text(work / LOG, done.stdout + done.stderr)
    last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:] or ["it says nothing"]
    return {"failed": last[0]} if done.returncode else dict(json.loads(last[0]))


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
