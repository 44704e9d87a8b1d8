"""`spechead export --head DIR --to FORMAT -o OUT`: write a head in the form that a server loads.

What the server would drop or misread is refused by name, and what was written is read back and must draft as the head
does before the folder gets its name. Knows nothing of how a format writes itself.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spechead.errors import UserError
from spechead.evaluation.evaluate import default_folder
from spechead.files import read_json, write_json
from spechead.formats.capabilities import ExportInfo
from spechead.formats.card import write_card
from spechead.formats.check import check_folder
from spechead.formats.files import CARD, RECORD, new_folder
from spechead.formats.manifest import make_manifest
from spechead.formats.options import ServerTargetOptions
from spechead.formats.registry import format_of
from spechead.heads import Head
from spechead.heads.files import load_head, read_info
from spechead.target import bundled
from spechead.target.loading import DTYPES
from spechead.target.model import Target


@dataclass
class ExportOptions(ServerTargetOptions):
    """Write a head in the form that a server loads."""

    head: str
    """Folder of a trained head."""
    to: str
    """Whose form: vllm, sglang, eagle or medusa (the original projects), speculators, tgi, trtllm, llama.cpp."""
    out: str
    """Folder to write; an earlier export there is replaced."""
    target_id: str = ""
    """Name by which the server knows the target, a hub id. Empty: the target's own, where it is no folder."""
    target_gguf: str = ""
    """For llama.cpp: GGUF file of the target, whose tokenizer the head's file repeats."""
    merged_target: str = ""
    """Folder to write the target to with the adapter merged that came with the head; servers load it as any model."""
    dtype: str = "auto"
    """Of the written floats: float32, bfloat16, float16. auto: that of the target's files."""
    report: str = ""
    """report.json of `spechead eval` on this head, for the model card. Empty: the one where eval writes it, if any."""
    license: str = ""
    """For the model card, such as apache-2.0; empty: left open."""

    def __post_init__(self) -> None:
        format_of(self.to)
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")


def export(options: ExportOptions) -> Path:
    """Write the folder and print how to serve it. Raises UserError where the format cannot carry the head."""
    folder, out = Path(options.head), Path(options.out)
    if options.merged_target:
        write_merged_target(options)
        options = replace(options, target=options.merged_target, force=True)
    info = read_info(folder)
    name = options.target or info.target
    target = options.load_target(name, "" if options.target else info.adapter)  # an adapter is refused
    head = load_head(folder, target, force=options.force, dtype=torch.float32)
    about = ExportInfo(_target_id(options, name), _dtype(options, target), _gguf(options, name))
    write_export(head, options.to, out, about, info.meta, _report(options), options.license)
    here = name != bundled.NAME and Path(name).is_dir() and not options.target_id
    served = replace(about, target_id=name) if here else about  # whose files and card name no folder
    command = format_of(options.to).serve(head, str(out), served)
    print(f"{head.kind} head for {format_of(options.to).SERVER}: {out}\n\nserve it:\n{command}\n")
    print(f"check it later:  {_check_command(options, name)}")
    return out


def write_merged_target(options: ExportOptions) -> None:
    """Write the head's target with the adapter merged, in transformers' own files, the tokenizer with them.

    Raises UserError where there is no adapter, or the head does not fit, or the format cannot carry it.
    """
    folder = Path(options.head)
    info = read_info(folder)
    name, adapter = options.target or info.target, info.adapter
    if not adapter:
        raise UserError(f"option merged-target: the target of {folder} carries no adapter; leave the option out")
    target = options.load_target(name, adapter)
    head = load_head(folder, target, force=options.force, dtype=torch.float32)
    target.adapter = ""  # from here on it is a model like any other
    dtype = _dtype(options, target)
    with new_folder(Path(options.merged_target), "merged-target") as merged:
        with tempfile.TemporaryDirectory() as scratch:  # so that what is refused is refused before
            about = ExportInfo(_target_id(options, options.merged_target), dtype, _gguf(options, name))
            format_of(options.to).save(head, Path(scratch), about)
        target.model.to(dtype).save_pretrained(merged)
        target.tokenizer.save_pretrained(merged)


def write_export(
    head: Head,
    to: str,
    out: Path,
    about: ExportInfo,
    meta: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    license: str = "",
) -> str:
    """Write the head to `out` with a record and a card, if it reads back as the head; the command that serves it."""
    form = format_of(to)
    with new_folder(out) as folder:
        form.save(head, folder, about)
        beside = form.serve(head, out.name, about)
        write_json(folder / RECORD, make_manifest(head, to, about, folder))
        options = {name: value for name, value in asdict(head.config).items() if value not in ("", None)}
        write_card(
            folder / CARD,
            head.kind,
            about.target_id,
            form.SERVER,
            beside,
            options=options,
            meta=meta or {},
            report=report,
            license=license,
        )
        wrong = [line for line in check_folder(folder, head.target, head) if not line.ok]
        if wrong:
            raise UserError(f"what was written for {form.SERVER} is not the head: {wrong[0].text}; nothing is kept")
    return form.serve(head, str(out), about)


def _check_command(options: ExportOptions, name: str) -> str:
    """With the options that this export needed."""
    words = ["spechead", "check", options.out, "--target", name, "--head", options.head]
    words += [f"--{flag.replace('_', '-')}" for flag in ("force", "trust_remote_code") if getattr(options, flag)]
    return shlex.join(words)


def _target_id(options: ExportOptions, name: str) -> str:
    """The target's public name; a folder of this machine is none."""
    if options.target_id:
        return options.target_id
    if name == bundled.NAME:
        return bundled.HUB_ID
    if name != options.merged_target and not Path(name).is_dir():
        return name
    if format_of(options.to).NAMES_TARGET:
        raise UserError(
            f"{options.to} files name their target, and {name} is a folder of this machine: give --target-id"
        )
    return Path(name).resolve().name


def _dtype(options: ExportOptions, target: Target) -> torch.dtype:
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    stored = getattr(target.config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) and stored in DTYPES.values() else torch.float32


def _gguf(options: ExportOptions, name: str) -> Path | None:
    if options.target_gguf:
        return Path(options.target_gguf)
    return bundled.gguf_file() if options.to == "llama.cpp" and name == bundled.NAME else None


def _report(options: ExportOptions) -> dict[str, Any] | None:
    """The report for the card; of another head's, one that was asked for is refused and one that lies there is not
    shown."""
    head = Path(options.head)
    path = Path(options.report) if options.report else default_folder(head) / "report.json"
    if not options.report and not path.is_file():
        return None
    report = read_json(path)
    if not _is_report(report):
        raise UserError(f"option report: {path} is no report of spechead eval")
    told = report.get("head") or ""
    if told and Path(told).resolve() == head.resolve():
        return dict(report)
    wrong = f"{path} measures {f'the head {told}' if told else 'no head'}, not {head}"
    if options.report:
        raise UserError(f"option report: {wrong}; measure this one: spechead eval --head {head}")
    print(f"the card shows no report: {wrong}", file=sys.stderr)
    return None


def _is_report(value: Any) -> bool:
    """Whether a file holds what the card reads: suites, the first of which says how its text was compared."""
    suites = value.get("suites") if isinstance(value, dict) else None
    entry = next(iter(suites.values()), None) if isinstance(suites, dict) else None
    compared = entry.get("lossless") if isinstance(entry, dict) else None
    return isinstance(compared, dict) and {"equal", "checked"} <= compared.keys()
