"""`spechead push`: upload an export to the Hugging Face hub, privately by default, with the user's stored login."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from spechead.errors import UserError, first_line
from spechead.formats.files import CONFIG, MANIFEST, PICKLED, absolute_paths, read_config
from spechead.formats.manifest import differences, extra_files, read_manifest, template_change

_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass
class PushOptions:
    """Upload an export to the Hugging Face hub."""

    folder: str
    """Folder of the export."""
    repo: str
    """Repository, such as org/name; created if it does not exist."""
    private: bool = True
    """Make the repository visible to its owner only."""
    dry_run: bool = False
    """List what would be uploaded, without a connection."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.repo):
            raise UserError(f"option repo: {self.repo!r} is not of the form org/name")


def push(options: PushOptions) -> None:
    """Upload the folder. Raises UserError if it is no sound export, or the hub refuses."""
    folder = Path(options.folder)
    files = publishable(folder)
    size = sum(path.stat().st_size for path in files)
    for path in files:
        print(f"{path.stat().st_size / 1e6:10.2f} MB  {path.name}")
    visibility = "private" if options.private else "public"
    if options.dry_run:
        print(f"would upload {len(files)} files, {size / 1e6:.2f} MB, to {options.repo} ({visibility})")
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        api = HfApi()
        api.create_repo(options.repo, private=options.private, exist_ok=True)
        _check_visibility(api.repo_info(options.repo).private, options)  # an existing one keeps its visibility
        api.upload_folder(folder_path=folder, repo_id=options.repo, allow_patterns=[path.name for path in files])
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        raise UserError(f"cannot upload to {options.repo}: {first_line(error)} (`hf auth login` logs in)") from error
    print(f"uploaded {len(files)} files, {size / 1e6:.2f} MB: https://huggingface.co/{options.repo} ({visibility})")


def _check_visibility(private: bool | None, options: PushOptions) -> None:
    """Refuse, before anything is uploaded, a repository of another visibility than the options'."""
    if private is not options.private:
        visibility, flag = ("private", "--private") if private else ("public", "--no-private")
        raise UserError(
            f"option repo: {options.repo} is {visibility}: give {flag}, or another repository; nothing is uploaded"
        )


def publishable(folder: Path) -> list[Path]:
    """The files of an unchanged export. Raises UserError for anything else in the folder, and for absolute paths."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} is no export of spechead: it has no {MANIFEST}")
    files = sorted(folder.iterdir())
    if odd := [path.name for path in files if path.suffix in PICKLED or path.is_symlink() or not path.is_file()]:
        raise UserError(f"{folder} contains {', '.join(odd)}: only plain files without pickles are uploaded")
    if extra := extra_files(manifest, folder):
        raise UserError(f"{folder} contains {', '.join(extra)}: not of the export; move it elsewhere")
    if changed := differences(manifest["files"], folder) + template_change(manifest, folder):
        raise UserError(f"{folder} is not what was exported: {changed[0]}")
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    settings = {name: value for name, value in manifest.items() if name != "files"}
    if paths := absolute_paths(config) + absolute_paths(settings):
        raise UserError(f"{folder} names a path of this machine: {', '.join(paths)}")
    return files
