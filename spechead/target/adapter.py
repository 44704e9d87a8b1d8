"""Adapters on a target (LoRA and its relatives), by peft: merged when a target is loaded, or trained in it."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spechead.errors import UserError, first_line
from spechead.files import replacing
from spechead.options import convert

# peft asks transformers' models for a property that is being renamed
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

FOLDER = "adapter"  # inside the folder of a head that was trained together with it
_NAMES = ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode")
_ALLOCATING = ("ADALORA", "ADAMSS")  # must be called at each step
_FROM_DATA = ("eva", "corda", "loftq")  # need data, or weights in another form


def merge(model: Any, source: str, digest: str, name: str) -> str:
    """Add the adapter in the folder (or of the hub id) `source` to the weights of `model`, in their own dtype.

    Returns the fingerprint of the sum, computed from the model's own `digest` and the stored adapter, so that it does
    not depend on rounding. `name`: the name of the model; warns on standard error if the adapter was made for another.
    Raises ValueError or OSError where the adapter does not fit.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(source)
    if config.is_prompt_learning:
        raise ValueError("it adds tokens, not weights, and cannot be merged")
    if getattr(config, "layer_replication", None):
        raise ValueError("it repeats layers (layer_replication), which makes another model")
    ends = _shape(model)[:2]
    wrapped = PeftModel(model, config)
    _refuse_mismatch(wrapped.load_adapter(source, "default"))
    if _shape(model)[:2] != ends and model.config.tie_word_embeddings:
        raise ValueError("it changes the embeddings or the output layer, which share their weights in this target")
    digest = _fingerprint(wrapped, digest)
    wrapped.merge_and_unload(safe_merge=True)
    base = config.base_model_name_or_path
    if base and Path(base).resolve() not in (Path(name).resolve(), Path(model.name_or_path).resolve()):
        print(f"warning: adapter {source} was made for {base!r}, here it is added to {name!r}", file=sys.stderr)
    return digest


class Adapter:
    """Trainable weights in a model that is otherwise frozen; without training they change nothing."""

    def __init__(self, model: Any, options: dict[str, Any], name: str) -> None:
        """`options`: fields of a peft config, including `peft_type`. Raises UserError where they do not fit."""
        from peft import get_peft_model

        config = _config(options)
        shape, before = _shape(model), _probe(model)
        try:
            self._wrapped = get_peft_model(model, config)
            self.parameters: list[nn.Parameter] = [p for p in self._wrapped.parameters() if p.requires_grad]
            new = _probe(model)
            with self.off():
                without = _probe(model)
        except Exception as error:  # peft checks few options itself
            raise UserError(f"option adapter.peft: {config.peft_type.value} fails: {first_line(error)}") from error
        if _shape(model)[:2] != shape[:2]:
            raise UserError(
                "option adapter.peft: the embeddings and the output layer must not change, since heads read them; "
                "remove them from target_modules and modules_to_save"
            )
        tolerance = 1e-3 if before.dtype == torch.float32 else 0.05
        same = all(
            torch.allclose(logits.float(), before.float(), rtol=tolerance, atol=tolerance) for logits in (new, without)
        )
        if not same or _shape(model) != shape:
            raise UserError(
                "option adapter.peft: a new adapter must leave the target's output unchanged, switched on or off; "
                "leave init_lora_weights at its default, and remove layer_replication"
            )
        if not self.parameters:
            raise UserError("option adapter.peft: the adapter has no weights to train; remove inference_mode")
        _refuse_unmergeable(self._wrapped)
        config.base_model_name_or_path = name

    def off(self) -> AbstractContextManager[None]:
        """Within the context, the model is without the adapter."""
        return self._wrapped.disable_adapter()

    def train(self, mode: bool) -> None:
        """Switch the adapter's dropout on or off, never the model's."""
        for name, module in self._wrapped.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" in name:
                module.train(mode)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Set `parameters` to these values, in their order."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.to(parameter.device, torch.float32)

    def save(self, folder: Path) -> None:
        """Write a standard peft adapter, whole or not at all."""
        with replacing(folder) as scratch:
            self._wrapped.save_pretrained(str(scratch), save_embedding_layers=False)  # else peft asks the hub

    def fingerprint(self, digest: str) -> str:
        """The fingerprint that `merge` returns for the model with this adapter as it is now."""
        return _fingerprint(self._wrapped, digest)


def _config(options: dict[str, Any]) -> Any:
    """The peft config of these fields. Raises UserError where one is unknown, of a wrong type, or not supported."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = str(options.get("peft_type", "LORA")).upper()
    if kind not in known:
        raise UserError(
            f"option adapter.peft.peft_type: must be one of {', '.join(sorted(known))}, got {options['peft_type']}"
        )
    fields = convert(known[kind], {k: v for k, v in options.items() if k != "peft_type"}, "adapter.peft.")
    if fields.get("bias", "none") != "none":
        raise UserError("option adapter.peft.bias: must be none, else the target changes without the adapter, too")
    if kind in _ALLOCATING:
        raise UserError(f"option adapter.peft.peft_type: {kind} reallocates ranks in training, which is not supported")
    if fields.get("init_lora_weights") in _FROM_DATA:
        raise UserError(
            f"option adapter.peft.init_lora_weights: {fields['init_lora_weights']} needs data before training, which "
            "is not supported; leave it at its default"
        )
    try:
        config = known[kind](**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"option adapter.peft: {first_line(error)}") from error
    if config.is_prompt_learning:
        raise UserError(f"option adapter.peft.peft_type: {kind} adds tokens; use one that adds weights")
    return config


def _shape(model: Any) -> tuple[Any, Any, int]:
    """The parts that heads rely on: embeddings, output layer, and the number of layers between them."""
    layers = model.config.get_text_config().num_hidden_layers
    return model.get_input_embeddings(), model.get_output_embeddings(), layers


@torch.no_grad()
def _probe(model: Any) -> Tensor:
    """The model's logits after a few tokens, [1, 3, V]."""
    ids = torch.arange(1, 4, device=model.get_input_embeddings().weight.device)[None]
    return model(input_ids=ids % model.config.get_text_config().vocab_size, use_cache=False).logits


def _refuse_mismatch(loaded: Any) -> None:
    """Raise ValueError where the file lacks tensors of the adapter or has others, which peft accepts."""
    for names, why in (
        (loaded.unexpected_keys, "it has tensors that match nothing:"),
        (loaded.missing_keys, "it lacks"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{why} {', '.join(sorted(names)[:3])}{more}")


@torch.no_grad()
def _refuse_unmergeable(wrapped: Any) -> None:
    """Merge a copy of each layer, since decoding with the adapter merges it. Raises UserError where that fails."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        _ = wrapped.merge_and_unload  # not every kind has it
        for module in wrapped.modules():
            if isinstance(module, BaseTunerLayer):
                copy.deepcopy(module).merge(safe_merge=True)
    except Exception as error:  # each kind of adapter raises its own
        raise UserError(f"option adapter.peft: such an adapter cannot be merged: {first_line(error)}") from error


def _fingerprint(wrapped: Any, digest: str) -> str:
    """sha256 over the model's digest, every tensor of the adapter, and its settings."""
    from peft import get_peft_model_state_dict

    sha = hashlib.sha256(f"{digest}{_settings(wrapped.active_peft_config)}".encode())
    for name, tensor in sorted(get_peft_model_state_dict(wrapped, save_embedding_layers=False).items()):
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _settings(config: Any) -> str:
    """All settings that differ from peft's defaults, as JSON, so that options added by later versions change nothing.

    Some determine values that are not stored, such as `random_loc_seed` of FourierFT. Lists are sorted, since lists of
    names come from sets. Names of models and versions are left out.
    """
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
    chosen = {name: v for name, v in config.to_dict().items() if name not in _NAMES and v != defaults.get(name)}
    lists = {name: sorted(map(str, value)) for name, value in chosen.items() if isinstance(value, set | list | tuple)}
    return json.dumps(chosen | lists, sort_keys=True, default=str)
