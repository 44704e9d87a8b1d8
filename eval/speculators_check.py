"""Parity with the `speculators` package: an exported EAGLE-3 head, loaded by the package's own class.

    python eval/speculators_check.py --speculators .venv-speculators/bin/python --head HEAD  # `make speculators-check`

The export must have the tensors of that class, and its drafts after a few texts must be the head's own: log
probabilities in float32 within `TOLERANCE`. Otherwise the exit code is 1 and the last line names the difference.
speculators_forward.py runs in the environment of the package.

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
NEGLIGIBLE = -30.0  # log probability below which float32 is imprecise
LOG = "speculators.log"
SCRIPT = Path(__file__).with_name("speculators_forward.py")


@dataclass(kw_only=True)
class ParityOptions:
    """Compare the drafts of an EAGLE-3 head with those of the speculators package for its export."""

    speculators: str
    """Python of an environment with the package."""
    head: str
    """Folder of a trained EAGLE-3 head."""
    work: str = "runs/speculators-check"
    """Folder for the export, and for the inputs and outputs of the package."""

    def __post_init__(self) -> None:
        if not os.access(self.speculators, os.X_OK):
            raise UserError(
                f"option speculators: {self.speculators} is no program; give the Python of an environment with it"
            )


def main(argv: Sequence[str]) -> int:
    options = parse(ParityOptions, argv, "speculators_check.py")
    work, folder = Path(options.work), Path(options.head)
    make_folder(work)
    name = read_info(folder).target
    target_id = Path(name).name if Path(name).is_dir() else ""
    exporting = ExportOptions(head=options.head, to="speculators", out=str(work / "export"), dtype="float32")
    export(replace(exporting, target_id=target_id))
    target = exporting.load_target(name)
    head = load_head(folder, target, dtype=torch.float32)
    inputs, expected = {}, []
    for i, length in enumerate(LENGTHS):
        text = torch.randint(target.vocab_size, (length,), generator=torch.Generator().manual_seed(i))
        drafts, log_probabilities = drafted(head, target, text, DRAFTS)
        inputs[f"{i}.hidden_states"], inputs[f"{i}.input_ids"] = rows(head, target, text, drafts)
        expected.append(log_probabilities)
    save_file(inputs, work / "inputs.safetensors")
    result = run_package(options, str(bundled.folder()) if name == bundled.NAME else name)
    if "failed" in result:
        print(f"FAILED: the package does not load the export: {result['failed']}; see {work / LOG}")
        return 1
    gaps = compare(expected, load_file(work / "outputs.safetensors"))
    print(f"speculators {result['version']} loads the export, {result['tensors']} tensors")
    print(f"log probabilities of drafts 1 to {DRAFTS} differ by at most {' '.join(f'{gap:.1e}' for gap in gaps)}")
    wrong = [f"{what} {', '.join(result[what])}" for what in ("missing", "unexpected") if result[what]]
    wrong += [f"draft {k} differs by {gap:.1e}" for k, gap in enumerate(gaps, 1) if not gap <= TOLERANCE]
    print(f"FAILED: {'; '.join(wrong)}" if wrong else "passed")
    return 1 if wrong else 0


@torch.no_grad()
def rows(head: Head, target: Target, text: Tensor, drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The package's inputs for a text of T tokens and its drafts: tapped states [1, n, taps*H], tokens [1, n].

    Row t has the states of token t and the token after it. Rows of drafts have no states, and no row sees them.
    """
    states = target.model(input_ids=text[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    tapped = torch.cat([states[layer] for layer in head.config.layers], -1)  # [1, T-1, taps*H]
    ahead = torch.tensor(drafts[:-1])
    return F.pad(tapped, (0, 0, 0, len(ahead))).contiguous(), torch.cat([text[1:], ahead])[None]


def compare(expected: Sequence[Tensor], outputs: dict[str, Tensor]) -> list[float]:
    """The largest difference of log probabilities at each depth. `expected`: [K, V] for each text."""
    worst = torch.zeros(DRAFTS)
    for i, (length, own) in enumerate(zip(LENGTHS, expected, strict=True)):
        drafted = outputs[str(i)][:, length - 2].log_softmax(-1)  # [K, D], of the last row that has states
        package = torch.full_like(own, float("-inf")).index_copy(1, outputs["ids"], drafted)
        worst = worst.max((package.clamp(min=NEGLIGIBLE) - own.clamp(min=NEGLIGIBLE)).abs().amax(1))
    return [float(gap) for gap in worst]


def run_package(options: ParityOptions, target: str) -> dict[str, Any]:
    """Run the package on the inputs; its report, or how it failed. `target`: a folder, or a hub id in the cache."""
    work = Path(options.work)
    words = [work / "export", target, work / "inputs.safetensors", work / "outputs.safetensors", DRAFTS]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [options.speculators, str(SCRIPT), *map(str, words)], env=environment, capture_output=True, text=True
    )
    write_text(work / LOG, done.stdout + done.stderr)
    last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:] or ["no output"]
    return {"failed": last[0]} if done.returncode else dict(json.loads(last[0]))


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
