"""Draft with the `speculators` package from an exported EAGLE-3 head; run by speculators_check.py in its environment.

    python speculators_forward.py EXPORT TARGET INPUTS OUTPUTS DRAFTS

Loads the folder EXPORT with the package's own class, which also needs the target's weights, and writes the logits of
DRAFTS drafts after each text of INPUTS. The last line of its output is a JSON object. It does not import spechead.

Legend: K drafts, D draft vocabulary, H hidden size, n rows.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from torch import Tensor

FROM_TARGET = {"verifier_norm.weight", "verifier_lm_head.weight"}  # the package never saves them


@torch.no_grad()
def main(export: str, target: str, inputs: str, outputs: str, drafts: str) -> dict[str, Any]:
    model = load(export, target)
    expected, stored = model.state_dict().keys(), load_file(Path(export) / "model.safetensors").keys()
    rows, results = load_file(inputs), {}
    for name in sorted({key.partition(".")[0] for key in rows}):
        results[name] = logits(model, rows[f"{name}.hidden_states"], rows[f"{name}.input_ids"], int(drafts))
    results["ids"] = torch.arange(model.draft_vocab_size)
    if model.d2t is not None:
        results["ids"] += model.d2t
    save_file(results, outputs)
    return {
        "version": importlib.metadata.version("speculators"),
        "tensors": len(stored),
        "missing": sorted(expected - stored - FROM_TARGET),
        "unexpected": sorted(stored - expected),
    }


def load(export: str, target: str) -> Any:
    """Load the model with the verifier's weights from the folder `target` in place of the id in the export."""
    config = Eagle3SpeculatorConfig.from_pretrained(export)
    config.speculators_config.verifier.name_or_path = target
    config.transformer_layer_config._attn_implementation = "eager"  # by default a kernel whose blocks are 128 rows
    return SpeculatorModel.from_pretrained(export, config=config).eval()


def logits(
    model: Any, hidden_states: Tensor, input_ids: Tensor, drafts: int
) -> Tensor:  # [1, n, 3H], [1, n] -> [K, n, D]
    """Logits of each draft as the package unrolls them: in step k a row reads the token k positions after its own."""
    steps: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, output: steps.append(output[0].float()))
    document = torch.zeros_like(input_ids)
    model(hidden_states, input_ids, document, ttt_steps=drafts)
    handle.remove()
    return torch.stack(steps)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
