"""A head's folder: `model.safetensors` with the head's tensors alone, and `config.json`, read as `HeadInfo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from spechead.decoding.tree import Plan, parse_tree
from spechead.errors import UserError
from spechead.files import read_json, reason, replacing, write_json
from spechead.heads import HEADS, Head
from spechead.options import convert
from spechead.target import adapter
from spechead.target.loading import DTYPES
from spechead.target.model import Target
from spechead.target.packed_linear import pack_linears

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", 1
_KEYS = {"format": int, "kind": str, "tree": str, "target": dict, "config": dict, "meta": dict}


@dataclass(frozen=True)
class HeadInfo:
    """The contents of a head's config.json."""

    folder: Path
    kind: str = ""  # of HEADS
    tree: str = ""  # default tree, for `parse_tree`
    options: dict[str, Any] = field(default_factory=dict)  # as in the file
    target: str = ""  # name of the target that the head was trained for
    fingerprint: str = ""  # of that target's weights
    target_adapter: str = ""  # adapter that the target had before training
    meta: dict[str, Any] = field(default_factory=dict)  # of its training

    @property
    def config(self) -> Any:
        """The head's options as its `Config`; options that the file lacks have their defaults."""
        kind = HEADS[self.kind]
        known = sorted(field.name for field in fields(kind.Config))
        if unknown := sorted(set(self.options) - set(known)):
            raise UserError(
                f"{self.folder / CONFIG}: a {self.kind} head has no option {', '.join(unknown)} in this version "
                f"(known: {', '.join(known)})"
            )
        try:
            return kind.Config(**convert(kind.Config, self.options, "head.options."))
        except UserError as error:
            raise UserError(f"{self.folder / CONFIG}: {error}") from error

    @property
    def adapter(self) -> str:
        """The adapter of the head's target: the one trained with it, else the one given to its training; "" if none."""
        trained = self.folder / adapter.FOLDER
        if trained.is_dir():
            return str(trained)
        if self.meta.get("adapter"):
            raise UserError(
                f"head {self.folder} was trained together with an adapter, and {trained} is missing: copy the whole "
                "folder of the head, or give --target the model that the adapter was merged into, and --force"
            )
        return self.target_adapter

    @property
    def four_bits(self) -> bool:
        """Whether the target was quantised to four bits during training."""
        return bool(self.meta.get("four_bits", False))

    @property
    def template(self) -> dict[str, Any]:
        """The chat template during training, as `ChatTemplate.record` gives it."""
        kept = {name: str(self.meta.get(name) or "") for name in ("chat_template", "template_date")}
        return {"template_kwargs": dict(self.meta.get("template_kwargs") or {})} | kept

    @property
    def foreign_data(self) -> str:
        """How many training answers are not marked as the target's own; "" if all are."""
        return str(self.meta.get("foreign") or "")

    @property
    def data(self) -> dict[str, Any]:
        """The training data and its held-out split: fields of DataConfig, and `seed`; {} if unknown."""
        return {"train": self.meta["data"]} | self.meta["split"] if "split" in self.meta else {}


def read_info(folder: Path | str) -> HeadInfo:
    """Read and validate config.json. Raises UserError if `folder` is no head that this version can read."""
    config = _read_config(Path(folder))
    target = config["target"]
    return HeadInfo(
        folder=Path(folder),
        kind=config["kind"],
        tree=config["tree"],
        options=config["config"],
        target=target["name"],
        fingerprint=target["fingerprint"],
        target_adapter=str(target.get("adapter", "")),
        meta=config["meta"],
    )


def has_head(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def save_head(head: Head, folder: Path, meta: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write float32 `weights` (default: the head's own), configuration, default tree, and the target's name."""
    state = dict(weights or head.state_dict())
    if empty := [name for name, tensor in state.items() if tensor.numel() == 0 or tensor.is_meta]:
        raise UserError(f"head tensors without content: {', '.join(empty)}; they must be gathered before saving")
    if bad := _not_finite(state):
        raise UserError(f"the head is not written: {bad} has non-finite values; lower optim.lr")
    with replacing(folder / WEIGHTS) as scratch:
        write_tensors(scratch, state)
        (folder / CONFIG).unlink(missing_ok=True)  # an old one must not outlive its weights
    target = {"name": head.target.base, "adapter": head.target.adapter, "fingerprint": head.target.fingerprint}
    config = {"format": FORMAT, "kind": head.kind, "tree": str(head.tree), "target": target}
    write_json(folder / CONFIG, config | {"config": asdict(head.config), "meta": meta})


def save_tree(folder: Path, tree: Plan) -> None:
    """Change the default tree of the head in `folder`; its weights are not touched."""
    write_json(folder / CONFIG, _read_config(folder) | {"tree": str(tree)})


def load_head(folder: Path | str, target: Target, *, force: bool = False, dtype: torch.dtype | None = None) -> Head:
    """Load the head in `folder` for `target`; a target with other weights is refused unless forced.

    It drafts in `dtype`, by default bfloat16 where that is fast, whatever the target computes in: drafts are guesses.
    """
    info = read_info(folder)
    if info.fingerprint != target.fingerprint and not force:
        _refuse_target(info, target)
    config = info.config
    try:
        head = HEADS[info.kind](config, target)
        head.tree = parse_tree(info.tree)
    except UserError as error:
        raise UserError(f"{info.folder / CONFIG}: {error}") from error
    _load_strictly(head, info.folder / WEIGHTS)
    head.to(device=target.device, dtype=dtype or DTYPES[target.drafting_dtype("auto")]).eval().requires_grad_(False)
    if target.packed:
        pack_linears(head)
    return head


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file; raises OSError, which `files.replacing` reports. Tensors may share memory."""
    try:
        save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file. Raises UserError if it is missing or damaged."""
    try:
        return load_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except SafetensorError as error:
        raise UserError(f"{path}: damaged or no safetensors file: {error}") from error


def _refuse_target(info: HeadInfo, target: Target) -> None:
    adapted = info.adapter
    if adapted and target.base == info.target and Path(adapted) == Path(target.adapter):
        raise UserError(
            f"head {info.folder}: {adapted} is no longer the adapter that it was trained with; restore that, "
            "or try this one with --force"
        )
    trained = repr(info.target) + (f" with the adapter {adapted}" if adapted else "")
    raise UserError(
        f"head {info.folder} was trained for target {trained}; "
        f"the weights of {target.name!r} differ. Use that target, or try this one with --force"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"no head at {folder}: a folder with {CONFIG} and {WEIGHTS} is expected")
    if not path.is_file() and has_head(folder / "head"):
        raise UserError(f"no head at {folder}: it is {folder / 'head'}")
    config = read_json(path)
    if not isinstance(config, dict) or not _KEYS.keys() <= {"meta", *config}:
        raise UserError(f"{path} is not a spechead head: it lacks {', '.join(sorted(_KEYS.keys() - {'meta'}))}")
    config.setdefault("meta", {})
    for name, kind in _KEYS.items():
        if not isinstance(config[name], kind):
            raise UserError(f"{path}: {name} is {config[name]!r}, which spechead never writes")
    for name in ("name", "fingerprint"):
        if not isinstance(config["target"].get(name), str):
            raise UserError(f"{path}: target has no {name}")
    if config["format"] != FORMAT or config["kind"] not in HEADS:
        raise UserError(
            f"{path}: format {config['format']} and kind {config['kind']!r} are unknown to this version "
            f"(it reads format {FORMAT} and {', '.join(HEADS)})"
        )
    return config


def _load_strictly(head: Head, path: Path) -> None:
    state, wanted = read_tensors(path), head.state_dict()
    missing, unexpected = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(f"{path}: missing tensors {missing}, unexpected tensors {unexpected}")
    wrong = [
        f"{name} {tuple(state[name].shape)} (needs {tuple(tensor.shape)})"
        for name, tensor in wanted.items()
        if tensor.shape != state[name].shape
    ]
    if wrong:
        raise UserError(f"{path}: tensors of a wrong shape: {', '.join(wrong)}")
    if bad := _not_finite(state):
        raise UserError(f"{path}: {bad} has non-finite values")
    if head.reduced and not _is_vocabulary(state["d2t"], state["t2d"]):
        raise UserError(f"{path}: d2t and t2d are no draft vocabulary of a target with {len(state['t2d'])} tokens")
    head.load_state_dict(state)


def _not_finite(state: Mapping[str, torch.Tensor]) -> str:
    """The first tensor with NaN or infinity; "" if there is none."""
    return next((name for name, t in state.items() if t.is_floating_point() and not torch.isfinite(t).all()), "")


def _is_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor) -> bool:
    """Whether both maps describe the same ascending target ids: int64 [D] and bool [V]."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return False
    return torch.equal(torch.arange(len(d2t)) + d2t, t2d.nonzero()[:, 0])
