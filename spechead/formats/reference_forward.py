"""A second implementation of drafting, to check exports: plain torch over the tensors of a head's files.

It uses none of the head classes, the hidden states that transformers returns, one sequence, and no cache.

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
from spechead.target.rotary import rotary_frequencies

Weights = dict[str, Tensor]


@torch.no_grad()
def log_probabilities(foreign: ForeignHead, target: Target, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Log probabilities of each of K drafts after the text and the drafts before it: float32 [K, V].

    -inf for tokens that are never drafted. The target has read the text except its last token, which it generated.
    """
    ids = torch.tensor([list(text[:-1])], device=target.device)
    states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    weights = {name: t.float() if t.is_floating_point() else t for name, t in foreign.tensors.items()}
    if foreign.kind == "medusa":
        logits = _medusa(foreign.config, weights, states[-1][0, -1].float(), target)
    else:
        logits = _eagle(foreign, weights, [state[0].float() for state in states], target, [*text[1:], *drafts])
    drafted = logits[: len(drafts)].log_softmax(-1)  # [K, D]
    if "d2t" not in weights:
        return drafted
    ids = torch.arange(drafted.shape[-1]) + weights["d2t"]
    return drafted.new_full((drafted.shape[0], target.vocab_size), float("-inf")).index_copy(1, ids, drafted)


def _medusa(c: dict[str, Any], w: Weights, hidden: Tensor, target: Target) -> Tensor:  # [H] -> [heads, D]
    rows = []
    for head in range(c["n_heads"]):
        x = hidden
        for block in range(c["n_layers"]):
            name = f"blocks.{head}.{block}.linear"
            x = x + F.silu(F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"]))
        rows.append(F.linear(x, w[f"lm_heads.{head}.weight"]) if c["output"] == "own" else _output(w, x, target))
    return torch.stack(rows)


def _eagle(foreign: ForeignHead, w: Weights, states: Sequence[Tensor], target: Target, tokens: list[int]) -> Tensor:
    """The rows of the text at once, then each draft from the hidden state before it: logits [n, D]."""
    c, eagle3 = foreign.config, foreign.kind == "eagle3"
    embedding = (stored_embedding(target) if foreign.embedding is None else foreign.embedding).float()
    features = _fused([states[layer] for layer in c["layers"]], c, w) if eagle3 else states[-1]  # [T-1, H]
    length = features.shape[0]
    inputs = embedding[torch.tensor(tokens)]  # [T-1+K, H]
    hidden, outputs = features, []
    for last in range(length, len(tokens) + 1):
        layers = _eagle3_layers if eagle3 else _eagle_layers
        out = layers(c, w, inputs[:last], hidden, target)[-1:]  # [1, H]
        outputs.append(out)
        hidden = torch.cat([hidden, out])
    drafted = torch.cat(outputs)
    if eagle3:
        return F.linear(drafted if c["norm_output"] else _norm(drafted, w["norm.weight"], c), w["lm_head.weight"])
    return _output(w, drafted, target)


def _fused(taps: Sequence[Tensor], c: dict[str, Any], w: Weights) -> Tensor:  # each [n, H] -> [n, H]
    if c["fc_norm"]:
        taps = [_norm(tap, w[f"fc_norm.{i}.weight"], c) for i, tap in enumerate(taps)]
    features = torch.cat(list(taps), -1)
    if c["norm_before_fc"]:
        features = _norm(features, w["input_norm.weight"], c)
    return F.linear(features, w["fc.weight"])


def _eagle3_layers(c: dict[str, Any], w: Weights, embeddings: Tensor, hidden: Tensor, target: Target) -> Tensor:
    name = "midlayer"
    normed = _norm(hidden, w[f"{name}.hidden_norm.weight"], c)
    x = torch.cat([_norm(embeddings, w[f"{name}.input_layernorm.weight"], c), normed], -1)  # [n, 2H]
    hidden = _rest(c, w, name, normed if c["norm_before_residual"] else hidden, x, target)
    for i in range(1, c["n_layers"]):
        name = f"layers.{i}"
        hidden = _rest(c, w, name, hidden, _norm(hidden, w[f"{name}.input_layernorm.weight"], c), target)
    return _norm(hidden, w["norm.weight"], c) if c["norm_output"] else hidden


def _eagle_layers(c: dict[str, Any], w: Weights, embeddings: Tensor, hidden: Tensor, target: Target) -> Tensor:
    hidden = F.linear(torch.cat([embeddings, hidden], -1), w["fc.weight"], w.get("fc.bias"))
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
        frequencies, factor = rotary_frequencies(target.config, size, c["rope_theta"], scaling)
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
    """Logits of the target's output layer, over the draft vocabulary."""
    rows, bias = target.output_rows(None)
    logits = target.scaled(F.linear(hidden, rows.float(), None if bias is None else bias.float()))
    return logits if "d2t" not in w else logits[..., torch.arange(w["d2t"].shape[0]) + w["d2t"]]
