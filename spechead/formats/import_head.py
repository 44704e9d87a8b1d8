"""`spechead import DIR --target T -o OUT`: make a head of files that another project or server loads.

Knows nothing of what each format's files look like.
"""

from __future__ import annotations

import shlex
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from spechead.errors import UserError
from spechead.formats.manifest import differences, read_manifest
from spechead.formats.options import ServerTargetOptions
from spechead.formats.registry import detect, format_of, read_head
from spechead.heads.files import save_head
from spechead.target.model import Target


@dataclass
class ImportOptions(ServerTargetOptions):
    """Make a head of files that another project or server loads."""

    folder: str
    """Folder with the files."""
    out: str = ""
    """Folder to write the head to."""
    format: str = ""
    """Whose form it is: vllm, sglang, eagle, medusa, speculators, tgi, trtllm, llama.cpp. Empty: what it looks like."""
    _: KW_ONLY  # what ServerTargetOptions asks for, where no head is there yet
    target: str = ""
    """The target that the head is for: smollm2-135m, a local folder or a hub id."""
    force: bool = False
    """Import although the export was made for a target of other weights, or its files were changed since."""

    def __post_init__(self) -> None:
        for name in ("target", "out"):
            if not getattr(self, name):
                raise UserError(f"option {name} is missing: give --{name}")
        if self.format:
            format_of(self.format)


def import_head(options: ImportOptions) -> Path:
    """Write the head and return its folder. UserError where the files make no head of ours, or another than they mean.

    What only training reads, such as a loss, is not in such files and has its default.
    """
    folder, out = Path(options.folder), Path(options.out)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"option out: {out} exists; give another folder")
    name = options.format or detect(folder)
    target = options.load_target(options.target)
    if not options.force:
        _check_record(folder, target)
    try:
        _, head = read_head(name, folder, target)
    except UserError as error:
        raise UserError(f"{folder} as {name}: {error}") from error
    save_head(head, out, {"imported_from": name})
    trust = " --trust-remote-code" if options.trust_remote_code else ""
    print(f"{head.kind} head: {out}\nmeasure it:      spechead eval --head {shlex.quote(str(out))}{trust}")
    return out


def _check_record(folder: Path, target: Target) -> None:
    """Refuse an export that is for another target, or not as it was written. Files of others have no record."""
    record = read_manifest(folder)
    if record is None:
        return
    if record["target"]["fingerprint"] != target.fingerprint:
        raise UserError(
            f"{folder} was exported for target {record['target']['name']!r}; the weights of {target.name!r} differ. "
            "Use that target, or --force to import it all the same"
        )
    if changed := differences(record["files"], folder, "it was exported", "it is not the export's"):
        raise UserError(
            f"{folder} is not what was exported: {changed[0]}. Export the head again, or --force to import what is "
            "there now"
        )
