"""The layout that most servers share for EAGLE heads: llama's words in config.json, and tensors without a prefix.

The EAGLE project began it; each format adds its own conventions. Knows nothing of files.

Legend: V target vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.heads import Head
from spechead.target.model import Target

UNKNOWN_LENGTH = 131072  # for targets whose configuration names no longest text
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Norms that an EAGLE-3 head may have: options of the head, and keys of configurations."""
SCALINGS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
}
"""Scaling of rotary positions -> its words that servers compute with as transformers does. They rescale `dynamic` at
every length, choose the factors of `longrope` by the longest text they were started for, and drop other words."""
_LENGTH = "original_max_position_embeddings"


def llama_config(head: Head, about: ExportInfo) -> dict[str, Any]:
    """The keys of a llama configuration for the head's decoder layer(s); rotary positions in old and new words."""
    c, target = head.config, head.target
    rope = {"rope_type": "default"} | _with_length(c.rope_scaling, target)
    needs_known_scaling(rope)
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
        "max_position_embeddings": longest(target),
        "rope_theta": c.rope_theta,
        "rope_parameters": rope | {"rope_theta": c.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(about.dtype).removeprefix("torch."),
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config


def shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a decoder layer that a llama configuration asks for.

    Raises UserError for what no head here computes.
    """
    for name, ours in (("hidden_act", "silu"), ("mlp_bias", False)):
        if config.get(name, ours) != ours:
            raise UserError(f"{name} is {config[name]}: heads here compute with {ours}")
    numbers = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
    if absent := [name for name in numbers if not _positive(config.get(name))]:
        raise UserError(f"the settings give no {', '.join(absent)} above 0")
    heads = config["num_attention_heads"]
    theta, scaling = rotary_of(config)
    needs_known_scaling({"rope_type": "default"} | scaling)
    if not _positive(theta):
        raise UserError(f"rope_theta is {theta}, and must be above 0")
    found = {name: config[name] for name in numbers} | {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_theta": theta,
    }
    return found | {"rope_scaling": scaling}


def _positive(value: Any) -> bool:
    """A head would take what is 0 from its target."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def needs_known_scaling(scaling: Mapping[str, Any]) -> None:
    """Refuse scalings of rotary positions that servers compute otherwise, or stop at."""
    kind = scaling["rope_type"]
    if kind == "default":
        return
    if kind not in SCALINGS:
        raise UserError(
            f"rope_scaling is of rope_type {kind!r}: servers compute it otherwise than heads here (alike are "
            f"{', '.join(SCALINGS)}); a head trained with a head.options.rope_theta of its own has none"
        )
    told = {name: value for name, value in scaling.items() if name != "rope_type" and value is not None}
    if odd := sorted(told.keys() - SCALINGS[kind]):
        raise UserError(f"rope_scaling {kind} has {', '.join(odd)}: servers do not read it, and draft otherwise")
    needed = SCALINGS[kind] - {"beta_fast", "beta_slow"}
    if wrong := sorted(name for name in needed | told.keys() if not _positive(told.get(name))):
        raise UserError(f"rope_scaling {kind} gives no {', '.join(wrong)} above 0: servers stop at load, or misread it")


def _with_length(scaling: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """A head's scaling with the length that it stretches: transformers takes the target's, if need be its longest."""
    told = {name: value for name, value in scaling.items() if value is not None}
    if _LENGTH in SCALINGS.get(told.get("rope_type", ""), ()):
        own = getattr(target.config, _LENGTH, None)
        told[_LENGTH] = own or told.get(_LENGTH) or target.config.max_position_embeddings
    return told


def rotary_of(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling of rotary positions; UserError where old and new words disagree, as servers read either."""
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    thetas = {float(place["rope_theta"]) for place in (config, new) if place.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise UserError(f"rope_theta is {config['rope_theta']}, but {new['rope_theta']} in rope_parameters")
    for place in (config, new, old):
        if (part := place.get("partial_rotary_factor")) not in (None, 1.0):
            raise UserError(f"partial_rotary_factor is {part}: heads here rotate all of each query and key")
    unused = ("rope_theta", "type", "partial_rotary_factor")
    scalings = [{k: v for k, v in words.items() if k not in unused} for words in (new, old) if words]
    for words, source in zip(scalings, (w for w in (new, old) if w), strict=True):
        words["rope_type"] = source.get("rope_type", source.get("type", "default"))
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise UserError(f"rope_scaling is {scalings[1]}, but rope_parameters say {scalings[0]}")
    scaling = scalings[0] if scalings and scalings[0]["rope_type"] != "default" else {}
    return (thetas.pop() if thetas else 10000.0), scaling


def longest(target: Target) -> int:
    """The longest text of the target, in tokens."""
    return target.max_positions if target.max_positions < 1 << 30 else UNKNOWN_LENGTH


def usual_layers(n_layers: int) -> list[int]:
    """Low, middle, high: what servers tap where nothing else is said, as indices into hidden_states."""
    return [2, n_layers // 2, n_layers - 3]


def tensors(head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's own, its floats in `dtype`."""
    state: dict[str, Tensor] = head.state_dict()
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def needs_plain_embedding(head: Head, server: str) -> None:
    """Refuse targets that scale their embeddings, for servers that hand a head the stored rows."""
    if own_embedding(head.target) is not None:
        raise UserError(
            f"target {head.target.name!r} scales its embeddings, and {server} gives the head the stored ones, whatever "
            "the files hold; nothing is written"
        )


def needs_plain_output(head: Head, server: str) -> None:
    """Refuse targets whose output layer has a bias, for heads that read it: servers apply the weight alone."""
    if head.target.output_rows(None)[1] is not None:
        raise UserError(
            f"the output layer of target {head.target.name!r} has a bias, which {server} does not apply to drafts; "
            "nothing is written"
        )


def needs_usual_layers(head: Head, server: str) -> None:
    usual = usual_layers(head.target.n_layers)
    if list(head.config.layers) != usual:
        raise UserError(
            f"head option layers={list(head.config.layers)}: {server} taps {usual} of this target, whatever the files "
            "say; nothing is written"
        )


def needs_inner_layers(head: Head, server: str, first: int = 0) -> None:
    """Refuse taps that servers read elsewhere: the last state is before the final norm there, and after it here."""
    last = head.target.n_layers - 1
    if outside := [layer for layer in head.config.layers if not first <= layer <= last]:
        raise UserError(
            f"head option layers={list(head.config.layers)}: {server} taps the inputs of layers {first} to {last}, and "
            f"{outside} means another state there; nothing is written"
        )


def flags(source: Any) -> dict[str, bool]:
    """The norms of a head's options, or those that a configuration asks for."""
    get = source.get if isinstance(source, Mapping) else lambda name: getattr(source, name)
    return {name: bool(get(name)) for name in FLAGS}


def flags_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """As vLLM and SGLang read them: a norm before the fusion may also stand in eagle_config."""
    inner = config.get("eagle_config") or {}
    return flags(config) | {"norm_before_fc": bool(inner.get("norm_before_fc", config.get("norm_before_fc", False)))}


def served_eagle3(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    target: Target,
    layers: Iterable[int],
    norms: Mapping[str, bool],
) -> ForeignHead:
    """An EAGLE-3 head of files in the shared layout; `layers` as indices into hidden_states, `norms` by FLAGS."""
    found = {_first_layer(name): tensor for name, tensor in state.items()}
    embedding = found.pop("embed_tokens.weight", None)
    size, total = config.get("draft_vocab_size") or target.vocab_size, target.vocab_size
    if config.get("vocab_size", total) != total:
        raise UserError(f"vocab_size is {config['vocab_size']}, but the target has {total} tokens")
    if size != total:
        found = _with_vocabulary(found, int(size), total)
    elif {"d2t", "t2d"} & found.keys():
        found = _without_vocabulary(found, total)
    options = shape(config) | {"layers": list(layers), "draft_vocab_size": 0 if size == total else size, **norms}
    options["n_layers"] = config.get("num_hidden_layers", 1)
    return ForeignHead("eagle3", options, found, embedding)


def served_eagle(config: Mapping[str, Any], state: Mapping[str, Tensor], biased: bool) -> ForeignHead:
    """An EAGLE head of files in the shared layout; `biased`: queries, keys and values are."""
    found = dict(state)
    embedding = found.pop("embed_tokens.weight", None)
    options = shape(config) | {
        "n_layers": config.get("num_hidden_layers", 1),
        "attention_bias": biased,
        "fc_bias": "fc.bias" in found,
    }
    return ForeignHead("eagle", options, found, embedding)


def _first_layer(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _with_vocabulary(found: dict[str, Tensor], size: int, total: int) -> dict[str, Tensor]:
    """Check the draft vocabulary and bring it in the order of target ids, the output rows with it."""
    if "d2t" not in found:
        raise UserError(f"d2t is missing, and draft_vocab_size is {size} of {total}: all drafts would be other tokens")
    if found["d2t"].is_floating_point():
        raise UserError(f"d2t is {str(found['d2t'].dtype)[6:]}: whole numbers are expected")
    offsets = found["d2t"].long().flatten()
    if offsets.shape[0] != size:
        raise UserError(f"d2t has {offsets.shape[0]} entries, but draft_vocab_size is {size}")
    ids = torch.arange(size) + offsets  # [D]
    if ids.min() < 0 or ids.max() >= total or ids.unique().shape[0] != size:
        raise UserError(f"d2t: draft id + d2t must be {size} different target ids below {total}")
    inside = torch.zeros(total, dtype=torch.bool)
    inside[ids] = True
    if "t2d" in found and not torch.equal(found["t2d"].bool().flatten(), inside):
        raise UserError("t2d does not mark the target ids that d2t leads to")
    order = ids.argsort()
    found |= {"d2t": ids[order] - torch.arange(size), "t2d": inside}
    if not torch.equal(order, torch.arange(size)) and "lm_head.weight" in found:
        found["lm_head.weight"] = found["lm_head.weight"][order]
    return found


def _without_vocabulary(found: dict[str, Tensor], total: int) -> dict[str, Tensor]:
    """A vocabulary of all tokens needs no tables; those that are there must say so."""
    if found.get("d2t", torch.zeros(1)).any() or not found.get("t2d", torch.ones(1)).all():
        raise UserError(f"d2t and t2d choose among tokens, but draft_vocab_size is all {total}")
    return {name: tensor for name, tensor in found.items() if name not in ("d2t", "t2d")}
