"""Text Generation Inference: Medusa heads in the Medusa project's files, which name the target to load.

Read off TGI 3.3. Its config.json must name no architecture. Knows nothing of other servers.
"""

from __future__ import annotations

from pathlib import Path

from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo, refuse
from spechead.formats.files import CONFIG, read_config
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.servers import medusa_project
from spechead.heads import Head
from spechead.target.model import Target

SERVER = "TGI 3.3"
CARRIES = {"medusa": frozenset({"n_heads", "n_layers"})}
CANNOT = {
    "output": "TGI reads an output layer for each head, and without them falls back to its other version of Medusa"
}
MISSING = "TGI falls back to its other version of Medusa, or stops"
UNKNOWN = "TGI drops it in silence"
NAMES_TARGET = True


def save(head: Head, folder: Path, about: ExportInfo) -> None:
    """Write config.json and medusa_lm_head.safetensors; raises UserError for what TGI would misread."""
    refuse(head, SERVER, CARRIES, CANNOT)
    medusa_project.write(head, folder, about, SERVER)


def load(folder: Path, target: Target) -> ForeignHead:
    """What TGI would make of the folder; raises UserError where it would stop, or no head here is like it."""
    config = read_config(folder / CONFIG)
    if "architectures" in config:
        raise UserError(
            "architectures is set: TGI then looks for another kind of speculator and serves without this one"
        )
    if not config.get("base_model_name_or_path"):
        raise UserError("base_model_name_or_path is missing: TGI loads the target of that name")
    return medusa_project.read(folder, target)


def serve(head: Head, folder: str, about: ExportInfo) -> str:
    return f"text-generation-launcher --model-id {folder} --speculate {head.config.n_heads}"
