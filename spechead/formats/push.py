"""`spechead push OUT REPO`: upload an export to the Hugging Face hub, privately unless told otherwise.

The edge of huggingface_hub, which finds the user's login by itself. Knows nothing of what is in the files beyond their
record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from spechead.errors import UserError, first_line
from spechead.formats.files import CONFIG, PICKLED, RECORD, absolute_paths, read_config
from spechead.formats.manifest import beside, differences, read_manifest

_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass
class PushOptions:
    """Upload an export to the Hugging Face hub."""

    folder: str
    """Folder of the export."""
    repo: str
    """Repository, such as org/name; made where it does not exist."""
    private: bool = True
    """Make the repository for its owner alone."""
    dry_run: bool = False
    """Show what would be uploaded, without a connection."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.repo):
            raise UserError(f"repository {self.repo!r} is not of the form org/name")


def push(options: PushOptions) -> None:
    """Raises UserError where the folder is no sound export, or the hub refuses."""
    folder = Path(options.folder)
    files = publishable(folder)
    size = sum(path.stat().st_size for path in files)
    for path in files:
        print(f"{path.stat().st_size / 1e6:10.2f} MB  {path.name}")
    kind = "private" if options.private else "public"
    if options.dry_run:
        print(f"would upload {len(files)} files, {size / 1e6:.2f} MB, to {options.repo} ({kind})")
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        api = HfApi()
        api.create_repo(options.repo, private=options.private, exist_ok=True)
        _check_visibility(api.repo_info(options.repo).private, options)  # one that was there stays as it was
        api.upload_folder(folder_path=folder, repo_id=options.repo, allow_patterns=[path.name for path in files])
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        raise UserError(f"cannot upload to {options.repo}: {first_line(error)} (`hf auth login` logs in)") from error
    print(f"uploaded {len(files)} files, {size / 1e6:.2f} MB: https://huggingface.co/{options.repo} ({kind})")


def _check_visibility(private: bool | None, options: PushOptions) -> None:
    """Refuse before anything is uploaded where others may read what was meant for the owner alone, or cannot."""
    if private is not options.private:
        found, flag = ("private", "--private") if private else ("public", "--no-private")
        raise UserError(
            f"repository {options.repo} is {found}: give {flag}, or another repository; nothing is uploaded"
        )


def publishable(folder: Path) -> list[Path]:
    """The files of an export that is as it was written, with nothing beside them; UserError where it is not so, or
    where they say too much."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    record = read_manifest(folder)
    if record is None:
        raise UserError(f"{folder} is no export of spechead: it holds no {RECORD}")
    files = sorted(folder.iterdir())
    if odd := [path.name for path in files if path.suffix in PICKLED or path.is_symlink() or not path.is_file()]:
        raise UserError(f"{folder} holds {', '.join(odd)}: only plain files without pickles are uploaded")
    if foreign := beside(record, folder):
        raise UserError(f"{folder} holds {', '.join(foreign)}: not of the export; move it elsewhere")
    if changed := differences(record["files"], folder, "it was exported", "it is not the export's"):
        raise UserError(f"{folder} is not what was exported: {changed[0]}")
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    told = {name: value for name, value in record.items() if name != "files"}
    if found := absolute_paths(config) + absolute_paths(told):
        raise UserError(f"{folder} names a path of this machine: {', '.join(found)}")
    return files
