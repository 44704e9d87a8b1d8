"""The Medusa project's own files, which other servers read as well: numbered tensors in medusa_lm_head.safetensors.

From the code of FasterDecoding/Medusa in 2024, whose from_pretrained builds five heads, whatever the files contain.
Each head has an output layer over the whole vocabulary.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from spechead.errors import UserError
from spechead.files import write_json
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, cannot_export, refuse_reduced, refuse_unsupported
from spechead.formats.files import CONFIG, read_config, read_weights, shorten
from spechead.formats.foreign_head import ForeignHead
from spechead.heads import Head
from spechead.heads.files import write_tensors
from spechead.target.loading import dtype_name
from spechead.target.model import Target

SERVER = "Medusa (FasterDecoding, 2024)"
SUPPORTS = {"medusa": frozenset({"n_heads"})}
REASONS = {
    "n_layers": "Medusa uses the same weights for all blocks of a head",
    "output": "in Medusa each head has its own output layer",
}
IF_MISSING = "Medusa silently leaves it random"
IF_UNKNOWN = "Medusa silently ignores it"
NAMES_TARGET = True
WEIGHTS = "medusa_lm_head.safetensors"
_HEADS = 5


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and medusa_lm_head.safetensors; raises UserError for what Medusa would ignore or misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    if head.config.n_heads != _HEADS:
        why = f"Medusa's from_pretrained builds {_HEADS} heads, whatever the files contain"
        raise cannot_export("n_heads", head.config.n_heads, why)
    write(head, folder, info, SERVER)


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as Medusa does. Raises UserError if no head here is equivalent."""
    foreign = read(folder, target)
    if foreign.config["n_heads"] != _HEADS:
        raise UserError(
            f"medusa_num_heads is {foreign.config['n_heads']}: Medusa's from_pretrained builds {_HEADS} heads, "
            "whatever the files contain (--format tgi reads any number)"
        )
    if foreign.config["n_layers"] > 1:
        raise UserError("medusa_num_layers is above 1: Medusa uses the same weights for all blocks of a head")
    return foreign


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    return (
        f'cd {folder} && python -c "import torch; from safetensors.torch import load_file; '
        f"torch.save(load_file('{WEIGHTS}'), 'medusa_lm_head.pt')\" && python -m medusa.inference.cli --model ."
    )


# ------------------------------------------------------------------------------------------------ shared with servers


def write(head: Head, folder: Path, info: ExportInfo, server: str) -> None:
    """Write the files of a head that the server supports."""
    refuse_reduced(head, f"{server} uses row numbers of the output layer as tokens")
    c = head.config
    config = {
        "medusa_num_heads": c.n_heads,
        "medusa_num_layers": c.n_layers,
        "base_model_name_or_path": info.target_id,
        "version": "2",
        "hidden_size": c.hidden_size,
        "vocab_size": head.target.vocab_size,
        "torch_dtype": dtype_name(info.dtype),
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in eagle_layout.tensors(head, info.dtype).items():
        number = re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{c.n_layers}.", name)
        tensors[number.removeprefix("blocks.")] = tensor
    write_json(folder / CONFIG, config)
    write_tensors(folder / WEIGHTS, tensors)


def read(folder: Path, target: Target) -> ForeignHead:
    """Read the files of a head that the server supports. Raises UserError if they do not fit the target."""
    config = read_config(folder / CONFIG)
    tensors = read_weights(folder, WEIGHTS, "medusa_lm_head.pt")
    layers, heads = config.get("medusa_num_layers", 1), config.get("medusa_num_heads", 5)
    if not isinstance(layers, int):
        raise UserError(f"medusa_num_layers is {shorten(layers)}, and must be a whole number")
    for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(name, expected) != expected:
            raise UserError(f"{name} is {config[name]}, the target's is {expected}")
    renamed = {}
    for name, tensor in tensors.items():
        number = re.sub(rf"^(\d+)\.{layers}\.weight$", r"lm_heads.\1.weight", name.removeprefix("medusa_head."))
        renamed[number if number.startswith("lm_heads") else f"blocks.{number}"] = tensor
    options = {"n_heads": heads, "n_layers": layers, "output": "own", "draft_vocab_size": 0}
    return ForeignHead("medusa", options | {"hidden_size": target.hidden_size}, renamed)
