"""spechead's own format: `model.safetensors` with the head's tensors alone, and `config.json`.

Knows nothing of training, and nothing of other formats.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from spechead.decoding.tree import Plan, parse_tree
from spechead.errors import UserError
from spechead.files import flush, make_folder, read_json, reason, write_json
from spechead.heads import HEADS, Head
from spechead.options import convert
from spechead.target import adapter
from spechead.target.loading import DTYPES
from spechead.target.model import Target
from spechead.target.packed_linear import pack_linears

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", 1


def save_head(head: Head, folder: Path, meta: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write the head: float32 `weights` (default: its own), configuration, default tree, and whose head it is."""
    state = {name: tensor for name, tensor in (weights or head.state_dict()).items()}
    empty = [name for name, tensor in state.items() if tensor.numel() == 0 or tensor.is_meta]
    if empty:
        raise UserError(f"head tensors without content: {', '.join(empty)}; they must be gathered before saving")
    if bad := _not_finite(state):
        raise UserError(f"the head is not written: {bad} holds numbers that are not finite; lower optim.lr")
    make_folder(folder)
    scratch = folder / f".{WEIGHTS}.{secrets.token_hex(4)}.tmp"
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, scratch)
        flush(scratch)
        (folder / CONFIG).unlink(missing_ok=True)  # an old one must not outlive its weights
        os.replace(scratch, folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot write {folder / WEIGHTS}: {why}") from error
    finally:
        scratch.unlink(missing_ok=True)
    target = {"name": head.target.base, "adapter": head.target.adapter, "fingerprint": head.target.fingerprint}
    config = {"format": FORMAT, "kind": head.kind, "tree": str(head.tree), "target": target}
    write_json(folder / CONFIG, config | {"config": asdict(head.config), "meta": meta})


def save_tree(folder: Path, tree: Plan) -> None:
    """Give the head in `folder` another default tree; its weights are not touched."""
    write_json(folder / CONFIG, _read_config(folder) | {"tree": str(tree)})


def load_head(folder: Path, target: Target, *, force: bool = False, dtype: torch.dtype | None = None) -> Head:
    """The head in `folder` for `target`; another target is refused unless forced.

    It drafts in `dtype`, by default bfloat16 where that is fast, whatever the target computes in: drafts are guesses.
    """
    config = _read_config(folder)
    if config["target"]["fingerprint"] != target.fingerprint and not force:
        carried = head_adapter(folder)
        if carried and target.base == config["target"]["name"] and Path(carried) == Path(target.adapter):
            raise UserError(
                f"head {folder}: {carried} is no longer the adapter that it was trained with; put that back, "
                "or --force to try this one all the same"
            )
        raise UserError(
            f"head {folder} was trained for target {config['target']['name']!r}"
            f"{f' with the adapter {carried}' if carried else ''}; the weights of {target.name!r} differ. "
            "Use that target, or --force to try it all the same"
        )
    try:
        head = HEADS[config["kind"]](_head_config(folder, config), target)
        tree = parse_tree(config["tree"])
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    _load_strictly(head, folder / WEIGHTS)
    head.tree = tree
    head.to(device=target.device, dtype=dtype or DTYPES[target.drafting_dtype("auto")]).eval().requires_grad_(False)
    if target.packed:
        pack_linears(head)
    return head


def read_head(folder: Path) -> tuple[str, Any, dict[str, torch.Tensor]]:
    """Kind, configuration and tensors of the head in `folder`, whoever its target is."""
    config = _read_config(folder)
    return config["kind"], _head_config(folder, config), read_tensors(folder / WEIGHTS)


def has_head(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def head_fingerprint(folder: Path) -> str:
    """Which weights the head was trained for."""
    return str(_read_config(folder)["target"]["fingerprint"])


def head_target(folder: Path) -> str:
    """The name of the target that the head was trained for."""
    return str(_read_config(folder)["target"]["name"])


def head_adapter(folder: Path) -> str:
    """The adapter that the head's target carries: the one trained with it, else the one it was given; "" for none."""
    beside, config = folder / adapter.FOLDER, _read_config(folder)
    if beside.is_dir():
        return str(beside)
    if config.get("meta", {}).get("adapter"):
        raise UserError(
            f"head {folder} was trained together with an adapter, and {beside} is missing: copy the whole folder of "
            "the head, or give --target the model that the adapter was merged into, and --force"
        )
    return str(config["target"].get("adapter", ""))


def head_in_four_bits(folder: Path) -> bool:
    """Whether the head learned from a target held in four bits."""
    return bool(_read_config(folder).get("meta", {}).get("four_bits", False))


def head_template_kwargs(folder: Path) -> dict[str, Any]:
    """The keywords for the chat template that the head was trained with."""
    return dict(_read_config(folder).get("meta", {}).get("template_kwargs") or {})


def head_foreign(folder: Path) -> str:
    """How many answers that the head learned from are not marked as its target's own; empty where all are."""
    return str(_read_config(folder).get("meta", {}).get("foreign") or "")


def head_data(folder: Path) -> dict[str, Any]:
    """What the head learned from and how some of it was held out: fields of DataConfig and `seed`; {} if unknown."""
    meta = _read_config(folder).get("meta", {})
    return {"train": meta["data"]} | meta["split"] if "split" in meta else {}


def _read_config(folder: Path) -> dict[str, Any]:
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no head at {folder}: a folder with {CONFIG} and {WEIGHTS} is expected")
    if not (folder / CONFIG).is_file() and has_head(folder / "head"):
        raise UserError(f"no head at {folder}: it is {folder / 'head'}")
    config = read_json(folder / CONFIG)
    wanted = {"format": int, "kind": str, "tree": str, "target": dict, "config": dict}
    if not isinstance(config, dict) or not wanted.keys() <= config.keys():
        raise UserError(f"{folder / CONFIG} is not a spechead head: it lacks {', '.join(sorted(wanted))}")
    parts = [(name, config[name], kind) for name, kind in wanted.items()] + [("meta", config.get("meta", {}), dict)]
    for name, value, kind in parts:
        if not isinstance(value, kind):
            raise UserError(f"{folder / CONFIG}: {name} is {value!r}, not as spechead writes it")
    for name in ("name", "fingerprint"):
        if not isinstance(config["target"].get(name), str):
            raise UserError(f"{folder / CONFIG}: target has no {name}")
    if config["format"] != FORMAT or config["kind"] not in HEADS:
        raise UserError(
            f"{folder / CONFIG}: format {config['format']} and kind {config['kind']!r} are unknown to this version "
            f"(it reads format {FORMAT} and {', '.join(HEADS)})"
        )
    return config


def _head_config(folder: Path, config: dict[str, Any]) -> Any:
    """The head's options; one that is not in the file did not exist when it was written, and has its default."""
    kind = HEADS[config["kind"]]
    known = {field.name for field in fields(kind.Config)}
    unknown = set(config["config"]) - known
    if unknown:
        raise UserError(
            f"{folder / CONFIG}: a {kind.kind} head has no option {', '.join(sorted(unknown))} in this version "
            f"(known: {', '.join(sorted(known))})"
        )
    return kind.Config(**convert(kind.Config, config["config"], "head.options."))


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file; UserError where that fails."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {reason(error) if isinstance(error, OSError) else error}") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; UserError where that fails."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _load_strictly(head: Head, path: Path) -> None:
    state = read_tensors(path)
    ours = head.state_dict()
    missing, unexpected = sorted(ours.keys() - state.keys()), sorted(state.keys() - ours.keys())
    if missing or unexpected:
        raise UserError(f"{path}: missing tensors {missing}, unexpected tensors {unexpected}")
    wrong = [
        f"{name} {tuple(state[name].shape)} (needs {tuple(ours[name].shape)})"
        for name in ours
        if ours[name].shape != state[name].shape
    ]
    if wrong:
        raise UserError(f"{path}: tensors of a wrong shape: {', '.join(wrong)}")
    if bad := _not_finite(state):
        raise UserError(f"{path}: {bad} holds numbers that are not finite")
    if head.reduced and not _is_vocabulary(state["d2t"], state["t2d"]):
        raise UserError(f"{path}: d2t and t2d are no draft vocabulary of a target with {len(state['t2d'])} tokens")
    head.load_state_dict(state)


def _not_finite(state: dict[str, torch.Tensor]) -> str:
    """The first tensor with a number that is none; "" where there is no such tensor."""
    return next((name for name, t in state.items() if t.is_floating_point() and not torch.isfinite(t).all()), "")


def _is_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor) -> bool:
    """Whether both maps say the same of ascending ids: int64 [D] and bool [V]."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return False
    return torch.equal(torch.arange(len(d2t)) + d2t, t2d.nonzero()[:, 0])
