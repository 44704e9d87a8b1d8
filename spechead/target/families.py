"""Differences between the model families of transformers: where their parts are, and how they scale logits."""

from __future__ import annotations

import copy
import inspect
import json
from typing import Any

import torch
from torch import Tensor, nn

from spechead.errors import UserError


def decoder_of(model: Any) -> nn.Module:
    """The model without its output layer."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def decoder_layers(decoder: nn.Module, n_layers: int, name: str) -> nn.ModuleList:
    """The list of decoder layers. Raises UserError where there is none of that length."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise UserError(f"target {name!r}: no list of {n_layers} decoder layers in {type(decoder).__name__}")


def takes_mask_dict(decoder: nn.Module) -> bool:
    """Whether the decoder expects a dict with a mask for each layer type (families that mix windows)."""
    return "causal_mask_mapping" in inspect.getsource(type(decoder).forward)


def scaled_logits(config: Any, logits: Tensor) -> Tensor:
    """The scaling of logits after the output layer. `Target` checks at load that no other change is missing."""
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return torch.tanh(logits / cap) * cap if cap else logits


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end an answer: those of the generation config, else of the config, and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for ids in (getattr(generation, "eos_token_id", None), getattr(model.config, "eos_token_id", None)):
        if ids is not None and not found:
            found.update([ids] if isinstance(ids, int) else ids)
    if getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def ignored_generation(model: Any) -> dict[str, Any]:
    """What the model's generation config sets apart from token ids, where it differs from transformers' defaults, in
    values that JSON has.

    None of it is applied: spechead takes only token ids from there.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return {}
    defaults = generation._get_default_generation_params()  # those of settings that are None
    taken = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    return {
        name: _plain(value)
        for name, value in sorted(generation.to_diff_dict().items())
        if name not in taken
        and not name.startswith("_")
        and value not in (defaults.get(name), None)
        and not (value is False and defaults.get(name) is None)
    }


def _plain(value: Any) -> Any:
    """A setting for a report: the content of an object of transformers, and the name of a number such as NaN."""
    value = value.to_dict() if hasattr(value, "to_dict") else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def with_module(module: Any, old: nn.Module, new: nn.Module) -> Any:
    """A copy of `module` that contains `new` in place of `old`, at any depth, and shares everything else."""
    twin = copy.copy(module)
    inside = {name: child for name, child in module.named_children() if any(part is old for part in child.modules())}
    swapped = {name: new if child is old else with_module(child, old, new) for name, child in inside.items()}
    twin._modules = {**module._modules, **swapped}
    return twin
