"""What a server drafts from the files of a head: plain torch over named tensors, without the heads' own classes.

A second opinion on an export. Hidden states are those that transformers itself returns. One text, no cache.

Legend: T tokens of the text, K drafts, V target vocabulary, D draft vocabulary, H hidden size, N/G query/key heads, C
head size, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.formats.foreign_head import ForeignHead, stored_embedding
from spechead.target.model import Target

Weights = dict[str, Tensor]


@torch.no_grad()
def log_probabilities(served: ForeignHead, target: Target, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Of the draft behind the text, and behind each draft but the last: float32 [K, V], -inf where none is drafted.

    The target has read the text without its last token, which it wrote itself.
    """
    seen = torch.tensor([list(text[:-1])], device=target.device)
    states = target.model(input_ids=seen, output_hidden_states=True, use_cache=False).hidden_states
    weights = {name: t.float() if t.is_floating_point() else t for name, t in served.tensors.items()}
    if served.kind == "medusa":
        small = _medusa(served.config, weights, states[-1][0, -1].float(), target)
    else:
        small = _eagle(served, weights, [state[0].float() for state in states], target, [*text[1:], *drafts])
    small = small[: len(drafts)].log_softmax(-1)  # [K, D]
    if "d2t" not in weights:
        return small
    ids = torch.arange(small.shape[-1]) + weights["d2t"]
    return small.new_full((small.shape[0], target.vocab_size), float("-inf")).index_copy(1, ids, small)


def _medusa(c: dict[str, Any], w: Weights, hidden: Tensor, target: Target) -> Tensor:  # [H] -> [heads, D]
    rows = []
    for head in range(c["n_heads"]):
        x = hidden
        for block in range(c["n_layers"]):
            name = f"blocks.{head}.{block}.linear"
            x = x + F.silu(F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"]))
        rows.append(F.linear(x, w[f"lm_heads.{head}.weight"]) if c["output"] == "own" else _output(w, x, target))
    return torch.stack(rows)


def _eagle(served: ForeignHead, w: Weights, states: Sequence[Tensor], target: Target, tokens: list[int]) -> Tensor:
    """Rows of the text in one go, then each draft from the hidden state before it: [n, D]."""
    c, third = served.config, served.kind == "eagle3"
    embedding = (stored_embedding(target) if served.embedding is None else served.embedding).float()
    features = _fused([states[layer] for layer in c["layers"]], c, w) if third else states[-1]  # [T-1, H]
    length = features.shape[0]
    inputs = embedding[torch.tensor(tokens)]  # [T-1+K, H]
    hidden, found = features, []
    for last in range(length, len(tokens) + 1):
        run = _eagle3_layers if third else _eagle_layers
        out = run(c, w, inputs[:last], hidden, target)[-1:]  # [1, H]
        found.append(out)
        hidden = torch.cat([hidden, out])
    drafted = torch.cat(found)
    if third:
        return F.linear(drafted if c["norm_output"] else _norm(drafted, w["norm.weight"], c), w["lm_head.weight"])
    return _output(w, drafted, target)


def _fused(taps: Sequence[Tensor], c: dict[str, Any], w: Weights) -> Tensor:  # each [n, H] -> [n, H]
    if c["fc_norm"]:
        taps = [_norm(tap, w[f"fc_norm.{i}.weight"], c) for i, tap in enumerate(taps)]
    together = torch.cat(list(taps), -1)
    if c["norm_before_fc"]:
        together = _norm(together, w["input_norm.weight"], c)
    return F.linear(together, w["fc.weight"])


def _eagle3_layers(c: dict[str, Any], w: Weights, embedded: Tensor, hidden: Tensor, target: Target) -> Tensor:
    name = "midlayer"
    normed = _norm(hidden, w[f"{name}.hidden_norm.weight"], c)
    x = torch.cat([_norm(embedded, w[f"{name}.input_layernorm.weight"], c), normed], -1)  # [n, 2H]
    hidden = _rest(c, w, name, normed if c["norm_before_residual"] else hidden, x, target)
    for i in range(1, c["n_layers"]):
        name = f"layers.{i}"
        hidden = _rest(c, w, name, hidden, _norm(hidden, w[f"{name}.input_layernorm.weight"], c), target)
    return _norm(hidden, w["norm.weight"], c) if c["norm_output"] else hidden


def _eagle_layers(c: dict[str, Any], w: Weights, embedded: Tensor, hidden: Tensor, target: Target) -> Tensor:
    hidden = F.linear(torch.cat([embedded, hidden], -1), w["fc.weight"], w.get("fc.bias"))
    for i in range(c["n_layers"]):
        name = f"layers.{i}"
        x = hidden if i == 0 else _norm(hidden, w[f"{name}.input_layernorm.weight"], c)
        hidden = _rest(c, w, name, hidden, x, target)
    return hidden


def _rest(c: dict[str, Any], w: Weights, name: str, hidden: Tensor, x: Tensor, target: Target) -> Tensor:
    """Attention over x [n, inputs] and the gated MLP, each added to `hidden` [n, H]."""
    hidden = hidden + _attention(c, w, f"{name}.self_attn", x, target)
    x = _norm(hidden, w[f"{name}.post_attention_layernorm.weight"], c)
    gate, up = (F.linear(x, w[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return hidden + F.linear(F.silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])


def _attention(c: dict[str, Any], w: Weights, name: str, x: Tensor, target: Target) -> Tensor:  # [n, inputs] -> [n, H]
    n, size = x.shape[0], c["head_dim"]

    def split(part: str) -> Tensor:  # [heads, n, C]
        flat = F.linear(x, w[f"{name}.{part}_proj.weight"], w.get(f"{name}.{part}_proj.bias"))
        return flat.view(n, -1, size).transpose(0, 1)

    angles = torch.arange(n)[:, None].float() * c["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    factor = 1.0
    if scaling := c.get("rope_scaling"):
        frequencies, factor = target.rotary_frequencies(size, c["rope_theta"], scaling)
        angles = torch.arange(n)[:, None].float() * frequencies
    cos, sin = (torch.cat([wave, wave], -1) * factor for wave in (angles.cos(), angles.sin()))  # [n, C]

    def turn(rows: Tensor) -> Tensor:
        return rows * cos + torch.cat([-rows[..., size // 2 :], rows[..., : size // 2]], -1) * sin

    query, key, value = turn(split("q")), turn(split("k")), split("v")
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = (query @ key.transpose(1, 2)) / size**0.5  # [N, n, n]
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    out = (scores.softmax(-1) @ value).transpose(0, 1).reshape(n, -1)
    return F.linear(out, w[f"{name}.o_proj.weight"])


def _norm(x: Tensor, weight: Tensor, c: dict[str, Any]) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt() * weight


def _output(w: Weights, hidden: Tensor, target: Target) -> Tensor:  # [..., H] -> [..., D]
    """The target's output layer. What it does to logits behind that leaves their order as it is."""
    rows, bias = target.output_rows(None)
    logits = target.scaled(F.linear(hidden, rows.float(), None if bias is None else bias.float()))
    return logits if "d2t" not in w else logits[..., torch.arange(w["d2t"].shape[0]) + w["d2t"]]
