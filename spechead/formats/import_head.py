"""`spechead import`: build a head from files that another project or server loads."""

from __future__ import annotations

import shlex
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from spechead.errors import UserError
from spechead.formats.manifest import differences, read_manifest
from spechead.formats.options import ExchangeOptions
from spechead.formats.registry import detect, format_of, read_head
from spechead.heads.files import save_head
from spechead.target.model import Target


@dataclass
class ImportOptions(ExchangeOptions):
    """Build a head from files that another project or server loads."""

    folder: str
    """Folder with the files."""
    out: str = ""
    """Folder to write the head to."""
    format: str = ""
    """Format of the files: vllm, sglang, eagle, medusa, speculators, tgi, trtllm, llama.cpp. Empty: detected."""
    _: KW_ONLY
    force: bool = False
    """Import although the export was made for a target with other weights, or its files were changed since."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target", "out"):
            if not getattr(self, name):
                raise UserError(f"option {name}: is missing; give --{name}")
        if self.format:
            format_of(self.format)


def import_head(options: ImportOptions) -> Path:
    """Write the head and return its folder. Raises UserError if no head here is equivalent to the files.

    What only training reads, such as a loss, is not in such files and has its default.
    """
    folder, out = Path(options.folder), Path(options.out)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"option out: {out} exists; give another folder")
    name = options.format or detect(folder)
    target = options.load_target()
    if not options.force:
        _check_manifest(folder, target)
    try:
        _, head = read_head(name, folder, target)
    except UserError as error:
        raise UserError(f"{folder} as {name}: {error}") from error
    save_head(head, out, {"imported_from": name})
    trust = " --trust-remote-code" if options.trust_remote_code else ""
    print(f"{head.kind} head: {out}\nmeasure it:      spechead eval --head {shlex.quote(str(out))}{trust}")
    return out


def _check_manifest(folder: Path, target: Target) -> None:
    """Refuse an export for a target of other weights, or changed since. Files of others have no manifest."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if manifest["target"]["fingerprint"] != target.fingerprint:
        raise UserError(
            f"{folder} was exported for target {manifest['target']['name']!r}; the weights of {target.name!r} differ. "
            "Use that target, or import it with --force"
        )
    if changed := differences(manifest["files"], folder):
        raise UserError(
            f"{folder} is not what was exported: {changed[0]}. Export the head again, or import the changed files "
            "with --force"
        )
