"""Adapters on a target (LoRA and its relatives): peft's edge. One is merged when a target is loaded, or trained in it.

Knows nothing of heads or of how the training goes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spechead.errors import UserError, first_line
from spechead.files import make_folder, reason
from spechead.options import convert

# peft asks transformers' models for a property that is being renamed
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

FOLDER = "adapter"  # inside the folder of a head that was trained together with it
_NAMES = ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode")
_ALLOCATING = ("ADALORA", "ADAMSS")  # that want to be told of each step
_FROM_DATA = ("eva", "corda", "loftq")  # that want to see data, or weights in another form


def merge(model: Any, source: str, digest: str, name: str) -> str:
    """Add the adapter in the folder (or of the hub id) `source` to the weights of `model`, in their own dtype.

    Returns the fingerprint of the sum, made of the model's own `digest` and of the adapter as it is stored, so that it
    does not depend on rounding. `name`: what the model is called; an adapter that names another is told on standard
    error. Raises ValueError or OSError where the adapter does not fit.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(source)
    if config.is_prompt_learning:
        raise ValueError(f"adapter {source!r} adds tokens, not weights, and cannot be merged")
    if getattr(config, "layer_replication", None):
        raise ValueError(f"adapter {source!r} repeats layers (layer_replication), which makes another model")
    ends = _shape(model)[:2]
    wrapped = PeftModel(model, config)
    _refuse_strangers(wrapped.load_adapter(source, "default"))
    if _shape(model)[:2] != ends and model.config.tie_word_embeddings:
        raise ValueError("it changes the embeddings or the output layer, which are one and the same in this target")
    digest = _fingerprint(wrapped, digest)
    wrapped.merge_and_unload(safe_merge=True)
    base = config.base_model_name_or_path
    if base and Path(base).resolve() not in (Path(name).resolve(), Path(model.name_or_path).resolve()):
        print(f"warning: adapter {source} was made for {base!r}, here it is added to {name!r}", file=sys.stderr)
    return digest


class Adapter:
    """Trainable weights inside a model that is otherwise frozen; new ones change nothing until they are trained."""

    def __init__(self, model: Any, options: dict[str, Any], name: str) -> None:
        """`options`: the fields of a peft config, `peft_type` among them. Raises UserError where they do not fit."""
        from peft import get_peft_model

        config = _config(options)
        shape, before = _shape(model), _said(model)
        try:
            self._wrapped = get_peft_model(model, config)
            self.parameters: list[nn.Parameter] = [p for p in self._wrapped.parameters() if p.requires_grad]
            new = _said(model)
            with self.off():
                without = _said(model)
        except Exception as error:  # whatever peft makes of options that it does not check
            raise UserError(f"option adapter.peft: {config.peft_type.value} fails: {first_line(error)}") from error
        if _shape(model)[:2] != shape[:2]:
            raise UserError(
                "option adapter.peft: the embeddings and the output layer must stay as they are, since heads read "
                "them; take them out of target_modules and modules_to_save"
            )
        near = 1e-3 if before.dtype == torch.float32 else 0.05
        same = all(torch.allclose(said.float(), before.float(), rtol=near, atol=near) for said in (new, without))
        if not same or _shape(model) != shape:
            raise UserError(
                "option adapter.peft: a new adapter must change nothing, and the target must be itself without it; "
                "leave init_lora_weights at its default, and layer_replication out"
            )
        if not self.parameters:
            raise UserError("option adapter.peft: the adapter has no weights to train; leave inference_mode out")
        _refuse_unmergeable(self._wrapped)
        config.base_model_name_or_path = name

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without the adapter."""
        with self._wrapped.disable_adapter():
            yield

    def train(self, mode: bool) -> None:
        """Dropout on or off: the adapter's own, never the model's."""
        for name, module in self._wrapped.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" in name:
                module.train(mode)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Take over the values of `parameters`, in their order."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.to(parameter.device, torch.float32)

    def save(self, folder: Path) -> None:
        """Write a standard peft adapter, whole or not at all."""
        make_folder(folder.parent)
        scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        try:
            self._wrapped.save_pretrained(str(scratch), save_embedding_layers=False)  # the rest would ask the hub
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {reason(error)}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def fingerprint(self, digest: str) -> str:
        """What `merge` will give for the model with this adapter as it is now."""
        return _fingerprint(self._wrapped, digest)


def _config(options: dict[str, Any]) -> Any:
    """The peft config of these fields. Raises UserError where one is unknown, of a wrong type, or of no effect here."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = str(options.get("peft_type", "LORA")).upper()
    if kind not in known:
        raise UserError(f"option adapter.peft.peft_type: no {options['peft_type']} (known: {', '.join(sorted(known))})")
    fields = convert(known[kind], {k: v for k, v in options.items() if k != "peft_type"}, "adapter.peft.")
    if fields.get("bias", "none") != "none":
        raise UserError("option adapter.peft: bias must be none, or the target without the adapter changes, too")
    if kind in _ALLOCATING:
        raise UserError(f"option adapter.peft.peft_type: {kind} moves ranks while it trains, which is not done here")
    if fields.get("init_lora_weights") in _FROM_DATA:
        raise UserError(
            f"option adapter.peft.init_lora_weights: {fields['init_lora_weights']} takes data before training, which "
            "is not done here; leave it at its default"
        )
    try:
        config = known[kind](**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"option adapter.peft: {first_line(error)}") from error
    if config.is_prompt_learning:
        raise UserError(f"option adapter.peft: {kind} adds tokens; take one that adds weights")
    return config


def _shape(model: Any) -> tuple[Any, Any, int]:
    """What heads count on: the embeddings, the output layer, and how many layers there are between them."""
    layers = model.config.get_text_config().num_hidden_layers
    return model.get_input_embeddings(), model.get_output_embeddings(), layers


@torch.no_grad()
def _said(model: Any) -> Tensor:
    """What the model says behind a few tokens, [1, 3, V]."""
    ids = torch.arange(1, 4, device=model.get_input_embeddings().weight.device)[None]
    return model(input_ids=ids % model.config.get_text_config().vocab_size, use_cache=False).logits


def _refuse_strangers(loaded: Any) -> None:
    """Raise ValueError where the file lacks tensors of the adapter, or has others; peft leaves both be."""
    for names, why in (
        (loaded.unexpected_keys, "it has tensors that match nothing:"),
        (loaded.missing_keys, "it lacks"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{why} {', '.join(sorted(names)[:3])}{more}")


@torch.no_grad()
def _refuse_unmergeable(wrapped: Any) -> None:
    """Merge a copy of each layer: whoever decodes with the adapter will merge it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        _ = wrapped.merge_and_unload  # which not every kind has
        for module in wrapped.modules():
            if isinstance(module, BaseTunerLayer):
                copy.deepcopy(module).merge(safe_merge=True)
    except Exception as error:  # each kind of adapter has its own
        raise UserError(f"option adapter.peft: such an adapter cannot be merged: {first_line(error)}") from error


def _fingerprint(wrapped: Any, digest: str) -> str:
    """sha256 over the model's digest, every tensor of the adapter, and the settings, which say how they act."""
    from peft import get_peft_model_state_dict

    found = hashlib.sha256(f"{digest}{_settings(wrapped.active_peft_config)}".encode())
    for name, tensor in sorted(get_peft_model_state_dict(wrapped, save_embedding_layers=False).items()):
        found.update(f"{name}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _settings(config: Any) -> str:
    """All settings that are not peft's defaults, as JSON: later versions bring more, which are at theirs.

    From some of them peft draws what it does not store, such as FourierFT's places from `random_loc_seed`. Lists are
    sorted, since those of names come from sets. What only names models and versions is left out.
    """
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
    told = {name: v for name, v in config.to_dict().items() if name not in _NAMES and v != defaults.get(name)}
    lists = {name: sorted(map(str, value)) for name, value in told.items() if isinstance(value, set | list | tuple)}
    return json.dumps(told | lists, sort_keys=True, default=str)
