"""The Medusa project's own files, which other servers read as well: numbered tensors in medusa_lm_head.safetensors.

Read off FasterDecoding/Medusa of 2024, whose from_pretrained builds five heads, whatever the files say. Heads have
output layers of their own over the whole vocabulary. Knows nothing of servers.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from spechead.errors import UserError
from spechead.files import write_json
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse
from spechead.formats.files import CONFIG, as_text, read_config, read_tensors, write_tensors
from spechead.formats.foreign_head import ForeignHead
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "Medusa (FasterDecoding, 2024)"
CARRIES = {"medusa": frozenset({"n_heads"})}
CANNOT = {
    "n_layers": "Medusa's blocks of one head are one block, several times",
    "output": "Medusa's heads have output layers of their own",
}
MISSING = "Medusa leaves it at random and says nothing"
UNKNOWN = "Medusa drops it in silence"
NAMES_TARGET = True
WEIGHTS = "medusa_lm_head.safetensors"
_HEADS = 5


def save(head: Head, folder: Path, about: ExportInfo) -> None:
    """Write config.json and medusa_lm_head.safetensors; raises UserError for what Medusa would drop or misread."""
    refuse(head, SERVER, CARRIES, CANNOT)
    if head.config.n_heads != _HEADS:
        raise UserError(
            f"head option n_heads={head.config.n_heads}: Medusa's from_pretrained builds {_HEADS} heads, whatever the "
            "files say; nothing is written"
        )
    write(head, folder, about, SERVER)


def load(folder: Path, target: Target) -> ForeignHead:
    """What Medusa would make of the folder; raises UserError where no head here is like it."""
    served = read(folder, target)
    if served.config["n_heads"] != _HEADS:
        raise UserError(
            f"medusa_num_heads is {served.config['n_heads']}: Medusa's from_pretrained builds {_HEADS} heads, whatever "
            "the files say (--format tgi reads any number)"
        )
    if served.config["n_layers"] > 1:
        raise UserError("medusa_num_layers is above 1: Medusa's blocks of one head are one block, several times")
    return served


def serve(head: Head, folder: str, about: ExportInfo) -> str:
    return (
        f'cd {folder} && python -c "import torch; from safetensors.torch import load_file; '
        f"torch.save(load_file('{WEIGHTS}'), 'medusa_lm_head.pt')\" && python -m medusa.inference.cli --model ."
    )


# ------------------------------------------------------------------------------------------------ for servers as well


def write(head: Head, folder: Path, about: ExportInfo, server: str) -> None:
    """The files, for a head that the server is known to carry."""
    if head.reduced:
        raise UserError(
            f"head option draft_vocab_size={head.draft_size}: {server} takes row numbers of the output layer for "
            "tokens; nothing is written"
        )
    c = head.config
    config = {
        "medusa_num_heads": c.n_heads,
        "medusa_num_layers": c.n_layers,
        "base_model_name_or_path": about.target_id,
        "version": "2",
        "hidden_size": c.hidden_size,
        "vocab_size": head.target.vocab_size,
        "torch_dtype": str(about.dtype).removeprefix("torch."),
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in eagle_layout.tensors(head, about.dtype).items():
        number = re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{c.n_layers}.", name)
        tensors[number.removeprefix("blocks.")] = tensor
    write_json(folder / CONFIG, config)
    write_tensors(folder / WEIGHTS, tensors)


def read(folder: Path, target: Target) -> ForeignHead:
    """The files in this project's names."""
    config = read_config(folder / CONFIG)
    tensors = read_tensors(folder, WEIGHTS, "medusa_lm_head.pt")
    layers, heads = config.get("medusa_num_layers", 1), config.get("medusa_num_heads", 5)
    if not isinstance(layers, int):
        raise UserError(f"medusa_num_layers is {as_text(layers)}, and must be a whole number")
    for name, told in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(name, told) != told:
            raise UserError(f"{name} is {config[name]}, the target's is {told}")
    found = {}
    for name, tensor in tensors.items():
        number = re.sub(rf"^(\d+)\.{layers}\.weight$", r"lm_heads.\1.weight", name.removeprefix("medusa_head."))
        found[number if number.startswith("lm_heads") else f"blocks.{number}"] = tensor
    options = {"n_heads": heads, "n_layers": layers, "output": "own", "draft_vocab_size": 0}
    return ForeignHead("medusa", options | {"hidden_size": target.hidden_size}, found)
