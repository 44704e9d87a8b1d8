"""`spechead export`: write a head in the format that a server loads.

Everything of the head that the server would ignore or misread is refused by name, and the written files are read back
and must draft as the head does before the folder gets its name.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spechead.errors import UserError
from spechead.evaluation.evaluate import default_folder
from spechead.files import read_json, write_json, write_text
from spechead.formats.capabilities import ExportInfo
from spechead.formats.card import write_card
from spechead.formats.check import check_written
from spechead.formats.files import CARD, MANIFEST, TEMPLATE, new_folder
from spechead.formats.manifest import make_manifest
from spechead.formats.options import ExchangeOptions
from spechead.formats.registry import Format, format_of
from spechead.heads import Head
from spechead.heads.files import load_head, read_info
from spechead.target import bundled
from spechead.target.loading import DTYPES
from spechead.target.model import Target


@dataclass
class ExportOptions(ExchangeOptions):
    """Write a head in the format that a server loads."""

    head: str
    """Folder of a trained head. Its target is the default."""
    to: str
    """The format: vllm, sglang, eagle or medusa (the original projects), speculators, tgi, trtllm, llama.cpp."""
    out: str
    """Folder to write; an earlier export there is replaced."""
    target_id: str = ""
    """The server's name for the target, a hub id. Empty: the target's own, unless it is a folder."""
    target_gguf: str = ""
    """For llama.cpp: GGUF file of the target, whose tokenizer the head's file repeats."""
    merged_target: str = ""
    """Folder for the target with the head's adapter merged, which servers load as any model."""
    dtype: str = "auto"
    """Precision of the written floats: float32, bfloat16, float16. auto: that of the target's files."""
    report: str = ""
    """report.json of `spechead eval` on this head, for the model card. Empty: the one where eval writes it, if any."""
    license: str = ""
    """Licence for the model card, such as apache-2.0; empty: not stated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        format_of(self.to, "to")
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"option dtype: {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")


def export(options: ExportOptions) -> Path:
    """Write the folder and print how to serve it. Raises UserError if the format cannot represent the head."""
    folder, out, form = Path(options.head), Path(options.out), format_of(options.to)
    head_info = read_info(folder)
    if options.merged_target:
        write_merged_target(options, form)
        options = replace(options, target=options.merged_target, force=True)
    name = options.target or head_info.target
    target = options.load_target(name, "" if options.target else head_info.adapter)  # an adapter is refused
    head = load_head(folder, target, force=options.force, dtype=torch.float32)
    info = _export_info(options, form, name, target)
    write_export(head, options.to, out, info, head_info.meta, _report(options), options.license)
    local = name != bundled.NAME and Path(name).is_dir() and not options.target_id
    command = form.serve_command(head, str(out), replace(info, target_id=name) if local else info)
    print(f"{head.kind} head for {form.SERVER}: {out}\n\nserve it:\n{command}\n")
    if (out / TEMPLATE).is_file():
        print(f"with the chat template that the head was trained with: --chat-template {out / TEMPLATE}\n")
    print(f"check it later:  {_check_command(options, name)}")
    return out


def write_merged_target(options: ExportOptions, form: Format) -> None:
    """Write the head's target with the adapter merged, in transformers' own files, along with the tokenizer.

    Raises UserError if there is no adapter, the head does not fit, or the format cannot represent it.
    """
    folder = Path(options.head)
    head_info = read_info(folder)
    name = options.target or head_info.target
    if not head_info.adapter:
        raise UserError(f"option merged_target: the target of {folder} has no adapter; leave the option out")
    target = options.load_target(name, head_info.adapter)
    head = load_head(folder, target, force=options.force, dtype=torch.float32)
    target.adapter = ""  # from here on it is a model like any other
    info = _export_info(options, form, name, target, options.merged_target)
    with new_folder(Path(options.merged_target), "merged_target") as merged:
        with tempfile.TemporaryDirectory() as scratch:  # refuse the head before the target is written
            form.save(head, Path(scratch), info)
        target.model.to(info.dtype).save_pretrained(merged)
        if template := trained_template(head_info.template, target):
            target.tokenizer.chat_template = template
        target.tokenizer.save_pretrained(merged)


def write_export(
    head: Head,
    to: str,
    out: Path,
    info: ExportInfo,
    meta: Mapping[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    license: str = "",
) -> None:
    """Write the head to `out` along with a manifest and a card. Raises UserError if it does not read back as the head.

    `meta`: of its training, `report`: of its evaluation, `license`: all for the card.
    """
    form = format_of(to, "to")
    with new_folder(out) as folder:
        form.save(head, folder, info)
        if template := trained_template(meta or {}, head.target):
            write_text(folder / TEMPLATE, template)
        write_json(folder / MANIFEST, make_manifest(head, to, info, folder))
        command = form.serve_command(head, out.name, info)
        card = folder / CARD
        write_card(card, head, info.target_id, form.SERVER, command, meta=meta or {}, report=report, license=license)
        try:
            check_written(folder, head, to)
        except UserError as error:
            raise UserError(
                f"the files written for {form.SERVER} are not the head: {error}; they are removed"
            ) from error


def trained_template(meta: Mapping[str, Any], target: Target) -> str:
    """The Jinja text of the chat template that a head was trained with, where that was not the target's default; a name
    is looked up among the target's own. Raises UserError where the target has none of that name."""
    given = str(meta.get("chat_template") or "")
    if not given:
        return ""
    named = target.tokenizer.chat_template
    text = str(named.get(given, given)) if isinstance(named, dict) else given
    if "{{" not in text and "{%" not in text:
        raise UserError(f"target {target.name!r} has no chat template {given[:60]!r}, with which the head was trained")
    return text


def _check_command(options: ExportOptions, name: str) -> str:
    """The check with the options that this export needed."""
    words = ["spechead", "check", options.out, "--target", name, "--head", options.head]
    words += [f"--{flag.replace('_', '-')}" for flag in ("force", "trust_remote_code") if getattr(options, flag)]
    return shlex.join(words)


def _export_info(options: ExportOptions, form: Format, name: str, target: Target, new_name: str = "") -> ExportInfo:
    """`name`: as the target was loaded; `new_name`: of the folder that it will be loaded from."""
    dtype = getattr(target.config, "dtype", None)
    if options.dtype != "auto":
        dtype = DTYPES[options.dtype]
    elif not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        dtype = torch.float32
    gguf = Path(options.target_gguf) if options.target_gguf else None
    if gguf is None and options.to == "llama.cpp" and name == bundled.NAME:
        gguf = bundled.gguf_file()
    return ExportInfo(_target_id(options, form, new_name or name), dtype, gguf)


def _target_id(options: ExportOptions, form: Format, name: str) -> str:
    """The target's public name, which a folder of this machine is not."""
    if options.target_id:
        return options.target_id
    if name == bundled.NAME:
        return bundled.HUB_ID
    if name != options.merged_target and not Path(name).is_dir():
        return name
    if form.NAMES_TARGET:
        raise UserError(
            f"option target_id: is missing; {options.to} files name their target, and {name} is a local folder"
        )
    return Path(name).resolve().name


def _report(options: ExportOptions) -> dict[str, Any] | None:
    """The report for the card. One of another head is refused if it was given, and ignored if it was found."""
    head = Path(options.head)
    path = Path(options.report) if options.report else default_folder(head) / "report.json"
    if not options.report and not path.is_file():
        return None
    report = read_json(path)
    if not _is_report(report):
        raise UserError(f"option report: {path} is no report of spechead eval")
    measured = report.get("head") or ""
    if measured and Path(measured).resolve() == head.resolve():
        return dict(report)
    wrong = f"{path} measures {f'the head {measured}' if measured else 'no head'}, not {head}"
    if options.report:
        raise UserError(f"option report: {wrong}; measure this one: spechead eval --head {head}")
    print(f"the card shows no report: {wrong}", file=sys.stderr)
    return None


def _is_report(value: Any) -> bool:
    """Whether a file has what the card shows: suites, the first of which states how its text was compared."""
    suites = value.get("suites") if isinstance(value, dict) else None
    entry = next(iter(suites.values()), None) if isinstance(suites, dict) else None
    compared = entry.get("lossless") if isinstance(entry, dict) else None
    return isinstance(compared, dict) and {"equal", "checked"} <= compared.keys()
