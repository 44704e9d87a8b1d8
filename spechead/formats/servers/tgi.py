"""Text Generation Inference: Medusa heads in the Medusa project's files, which name the target to load.

From the code of TGI 3.3. Its config.json must not name an architecture.
"""

from __future__ import annotations

from pathlib import Path

from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo, refuse_unsupported
from spechead.formats.files import CONFIG, read_config
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.servers import medusa_project
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "TGI 3.3"
SUPPORTS = {"medusa": frozenset({"n_heads", "n_layers"})}
REASONS = {
    "output": "TGI reads an output layer for each head, and falls back to its other version of Medusa without them"
}
IF_MISSING = "TGI falls back to its other version of Medusa, or stops"
IF_UNKNOWN = "TGI silently ignores it"
NAMES_TARGET = True


def save(head: Head, folder: Path, info: ExportInfo) -> None:
    """Write config.json and medusa_lm_head.safetensors; raises UserError for what TGI would misread."""
    refuse_unsupported(head, SERVER, SUPPORTS, REASONS)
    medusa_project.write(head, folder, info, SERVER)


def load(folder: Path, target: Target) -> ForeignHead:
    """Read the files as TGI does. Raises UserError where it would stop, or no head here is equivalent."""
    config = read_config(folder / CONFIG)
    if "architectures" in config:
        raise UserError(
            "architectures is set: TGI then looks for another kind of speculator and serves without this head"
        )
    if not config.get("base_model_name_or_path"):
        raise UserError("base_model_name_or_path is missing: TGI loads the target of that name")
    return medusa_project.read(folder, target)


def serve_command(head: Head, folder: str, info: ExportInfo) -> str:
    return f"text-generation-launcher --model-id {folder} --speculate {head.config.n_heads}"
