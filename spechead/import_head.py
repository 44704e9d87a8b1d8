"""`spechead import DIR --target T -o OUT`: make a head of files that another project or server loads.

Knows nothing of what each format's files look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spechead.errors import UserError
from spechead.formats.foreign import detect, format_of, read_head
from spechead.formats.native import save_head
from spechead.target import Target


@dataclass
class ImportOptions:
    """Make a head of files that another project or server loads."""

    folder: str
    """Folder with the files."""
    target: str = ""
    """The target that the head is for: smollm2-135m, a local folder or a hub id."""
    out: str = ""
    """Folder to write the head to."""
    format: str = ""
    """Whose form it is: vllm, sglang, eagle, medusa, speculators, tgi, trtllm, llama.cpp. Empty: what it looks like."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's files."""

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
    target = Target.load(
        options.target, dtype="float32", device="cpu", trust_remote_code=options.trust_remote_code, pack=False
    )
    try:
        _, head = read_head(name, folder, target)
    except UserError as error:
        raise UserError(f"{folder} as {name}: {error}") from error
    save_head(head, out, {"imported_from": name})
    print(f"{head.kind} head: {out}\nmeasure it:      spechead eval --head {out}")
    return out
