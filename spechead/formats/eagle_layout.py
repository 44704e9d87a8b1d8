"""The layout that most servers share for EAGLE heads: a llama configuration, and tensors without a prefix.

It comes from the EAGLE project; each format adds its own conventions.

Legend: V target vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo, cannot_export
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.heads import Head
from spechead.target.loading import dtype_name
from spechead.target.model import Target

UNKNOWN_LENGTH = 131072  # for targets whose configuration gives no longest text
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Optional norms of an EAGLE-3 head: names of its options, and keys of configurations."""
SCALINGS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
}
"""Scaling of rotary positions -> its parameters with which servers compute as transformers does. They rescale `dynamic`
at every length, choose the factors of `longrope` by the longest text they were started for, and ignore other
parameters."""
_LENGTH = "original_max_position_embeddings"


def llama_config(head: Head, info: ExportInfo) -> dict[str, Any]:
    """A llama configuration of the head's decoder layer(s), with rotary positions under their old and new keys."""
    c, target = head.config, head.target
    rope = {"rope_type": "default"} | _with_length(c.rope_scaling, target)
    refuse_unknown_scaling(rope)
    config = {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": max_positions(target),
        "rope_theta": c.rope_theta,
        "rope_parameters": rope | {"rope_theta": c.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(info.dtype),
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config


def layer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a decoder layer with a llama configuration. Raises UserError if heads here compute otherwise."""
    for name, supported in (("hidden_act", "silu"), ("mlp_bias", False)):
        if config.get(name, supported) != supported:
            raise UserError(f"{name} is {config[name]}: heads here compute with {supported}")
    numbers = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
    if absent := [name for name in numbers if not _positive(config.get(name))]:
        raise UserError(f"the settings give no {', '.join(absent)} above 0")
    heads = config["num_attention_heads"]
    theta, scaling = rotary_of(config)
    refuse_unknown_scaling({"rope_type": "default"} | scaling)
    if not _positive(theta):
        raise UserError(f"rope_theta is {theta}, and must be above 0")
    options = {name: config[name] for name in numbers} | {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_theta": theta,
    }
    return options | {"rope_scaling": scaling}


def _positive(value: Any) -> bool:
    """Whether a value is a number above 0; a head would take 0 from its target."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def refuse_unknown_scaling(scaling: Mapping[str, Any]) -> None:
    """Refuse scalings of rotary positions that servers compute otherwise, or that stop them."""
    kind = scaling["rope_type"]
    if kind == "default":
        return
    if kind not in SCALINGS:
        raise UserError(
            f"rope_scaling has rope_type {kind!r}: servers compute it otherwise than heads here (the same are "
            f"{', '.join(SCALINGS)}); a head trained with its own head.options.rope_theta has none"
        )
    given = {name: value for name, value in scaling.items() if name != "rope_type" and value is not None}
    if odd := sorted(given.keys() - SCALINGS[kind]):
        raise UserError(f"rope_scaling {kind} has {', '.join(odd)}: servers do not read it, and draft otherwise")
    required = SCALINGS[kind] - {"beta_fast", "beta_slow"}
    if wrong := sorted(name for name in required | given.keys() if not _positive(given.get(name))):
        raise UserError(f"rope_scaling {kind} gives no {', '.join(wrong)} above 0: servers stop at load, or misread it")


def _with_length(scaling: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """A head's scaling along with the original length; transformers uses the target's, or else its longest."""
    given = {name: value for name, value in scaling.items() if value is not None}
    if _LENGTH in SCALINGS.get(given.get("rope_type", ""), ()):
        own = getattr(target.config, _LENGTH, None)
        given[_LENGTH] = own or given.get(_LENGTH) or target.config.max_position_embeddings
    return given


def rotary_of(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling of rotary positions. Raises UserError if old and new keys disagree: servers read either."""
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    thetas = {float(place["rope_theta"]) for place in (config, new) if place.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise UserError(f"rope_theta is {config['rope_theta']}, but {new['rope_theta']} in rope_parameters")
    for place in (config, new, old):
        if (part := place.get("partial_rotary_factor")) not in (None, 1.0):
            raise UserError(f"partial_rotary_factor is {part}: heads here rotate all of each query and key")
    unused = ("rope_theta", "type", "partial_rotary_factor")
    scalings = [
        {k: v for k, v in place.items() if k not in unused}
        | {"rope_type": place.get("rope_type", place.get("type", "default"))}
        for place in (new, old)
        if place
    ]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise UserError(f"rope_scaling is {scalings[1]}, but {scalings[0]} in rope_parameters")
    scaling = scalings[0] if scalings and scalings[0]["rope_type"] != "default" else {}
    return (thetas.pop() if thetas else 10000.0), scaling


def max_positions(target: Target) -> int:
    """The longest text of the target, in tokens."""
    return target.max_positions if target.max_positions < 1 << 30 else UNKNOWN_LENGTH


def default_taps(n_layers: int) -> list[int]:
    """Low, middle, high: the layers that servers tap by default, as indices into hidden_states."""
    return [2, n_layers // 2, n_layers - 3]


def tensors(head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's own tensors, floats in `dtype`."""
    state: dict[str, Tensor] = head.state_dict()
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def refuse_scaled_embedding(head: Head, server: str) -> None:
    """Refuse targets that scale their embeddings, for servers that give a head the stored rows."""
    if own_embedding(head.target) is not None:
        raise UserError(
            f"target {head.target.name!r} scales its embeddings, and {server} gives the head the stored ones, whatever "
            "the files contain"
        )


def refuse_output_bias(head: Head, server: str) -> None:
    """Refuse targets whose output layer has a bias, for heads that share it: servers apply the weight alone."""
    if head.target.output_rows(None)[1] is not None:
        raise UserError(
            f"the output layer of target {head.target.name!r} has a bias, which {server} does not apply to drafts"
        )


def require_default_taps(head: Head, server: str) -> None:
    """Refuse other taps, for servers whose files cannot name them."""
    layers, taps = list(head.config.layers), default_taps(head.target.n_layers)
    if layers != taps:
        raise cannot_export("layers", layers, f"{server} taps {taps} of this target, whatever the files contain")


def refuse_outer_taps(head: Head, server: str, first: int = 0) -> None:
    """Refuse taps that are other states in servers: the last is before the final norm there, and after it here."""
    layers, last = list(head.config.layers), head.target.n_layers - 1
    if outside := [layer for layer in layers if not first <= layer <= last]:
        why = f"{server} taps the inputs of layers {first} to {last}, and {outside} is another state there"
        raise cannot_export("layers", layers, why)


def norms(source: Any) -> dict[str, bool]:
    """The norms in a head's options, or in a configuration."""
    get = source.get if isinstance(source, Mapping) else lambda name: getattr(source, name)
    return {name: bool(get(name)) for name in NORMS}


def norms_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """The norms as vLLM and SGLang read them: norm_before_fc may also be in eagle_config."""
    inner = config.get("eagle_config") or {}
    return norms(config) | {"norm_before_fc": bool(inner.get("norm_before_fc", config.get("norm_before_fc", False)))}


def read_eagle3(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    target: Target,
    layers: Iterable[int],
    norms: Mapping[str, bool],
) -> ForeignHead:
    """Read an EAGLE-3 head in the shared layout; `layers` as indices into hidden_states, `norms` named as NORMS."""
    tensors = {_first_layer(name): tensor for name, tensor in state.items()}
    embedding = tensors.pop("embed_tokens.weight", None)
    size, total = config.get("draft_vocab_size") or target.vocab_size, target.vocab_size
    if config.get("vocab_size", total) != total:
        raise UserError(f"vocab_size is {config['vocab_size']}, but the target has {total} tokens")
    if size != total:
        tensors = _with_vocabulary(tensors, int(size), total)
    elif {"d2t", "t2d"} & tensors.keys():
        tensors = _without_vocabulary(tensors, total)
    options = layer_options(config) | {"layers": list(layers), "draft_vocab_size": 0 if size == total else size}
    options |= {**norms, "n_layers": config.get("num_hidden_layers", 1)}
    return ForeignHead("eagle3", options, tensors, embedding)


def read_eagle(config: Mapping[str, Any], state: Mapping[str, Tensor], biased: bool) -> ForeignHead:
    """Read an EAGLE head in the shared layout; `biased`: whether queries, keys and values have biases."""
    tensors = dict(state)
    embedding = tensors.pop("embed_tokens.weight", None)
    options = layer_options(config) | {
        "n_layers": config.get("num_hidden_layers", 1),
        "attention_bias": biased,
        "fc_bias": "fc.bias" in tensors,
    }
    return ForeignHead("eagle", options, tensors, embedding)


def _first_layer(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _with_vocabulary(tensors: dict[str, Tensor], size: int, total: int) -> dict[str, Tensor]:
    """Check the draft vocabulary and sort it by target id, along with the output rows."""
    if "d2t" not in tensors:
        raise UserError(f"d2t is missing, and draft_vocab_size is {size} of {total}: all drafts would be other tokens")
    if tensors["d2t"].is_floating_point():
        raise UserError(f"d2t is {dtype_name(tensors['d2t'].dtype)}: whole numbers are expected")
    offsets = tensors["d2t"].long().flatten()
    if offsets.shape[0] != size:
        raise UserError(f"d2t has {offsets.shape[0]} entries, but draft_vocab_size is {size}")
    ids = torch.arange(size) + offsets  # [D]
    if ids.min() < 0 or ids.max() >= total or ids.unique().shape[0] != size:
        raise UserError(f"d2t: draft id + d2t must be {size} different target ids below {total}")
    inside = torch.zeros(total, dtype=torch.bool)
    inside[ids] = True
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().flatten(), inside):
        raise UserError("t2d does not mark the target ids of d2t")
    order = ids.argsort()
    tensors |= {"d2t": ids[order] - torch.arange(size), "t2d": inside}
    if not torch.equal(order, torch.arange(size)) and "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    return tensors


def _without_vocabulary(tensors: dict[str, Tensor], total: int) -> dict[str, Tensor]:
    """Drop the tables of a whole vocabulary. Raises UserError if they select tokens."""
    if tensors.get("d2t", torch.zeros(1)).any() or not tensors.get("t2d", torch.ones(1)).all():
        raise UserError(f"d2t and t2d select tokens, but draft_vocab_size is all {total}")
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
