"""A decoder layer of a head: its shape and rotary scaling, taken from the target or given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spechead.errors import UserError
from spechead.heads.decoder_shape import DecoderShape
from spechead.heads.layers import Attention, Rotary
from spechead.target import rotary
from spechead.target.model import Target
from tests.helpers import targets
from tests.helpers.heads import make_head
from tests.helpers.targets import BASE, make_target

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-own-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 256,
    },
}


POSITIONS = torch.tensor([[0, 1, 7, 63, 200]])


def llama(target: Target) -> transformers.LlamaConfig:
    assert isinstance(target.config, transformers.LlamaConfig)
    return target.config


def scaled(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Target:
    rope = {"rope_type": name, "rope_theta": 500.0, **SCALINGS[name]}
    monkeypatch.setitem(
        targets.FAMILIES, name, lambda: transformers.LlamaConfig(**BASE | changes, rope_parameters=dict(rope))
    )
    return make_target(name)


@pytest.mark.parametrize("name", SCALINGS)
def test_positions_are_scaled_as_the_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = scaled(name, monkeypatch)
    shape = DecoderShape()
    shape.fill(target)
    assert shape.rope_theta == 500.0 and shape.rope_scaling["rope_type"] == target.config.rope_parameters["rope_type"]
    cos, sin = shape.attention(target, 32).rotation(POSITIONS)  # [1, 1, T, 4]
    expected = LlamaRotaryEmbedding(llama(target))(torch.zeros(1), POSITIONS)  # halves twice: [1, T, 8]
    assert torch.allclose(cos[0], expected[0][..., :4], atol=1e-6)
    assert torch.allclose(sin[0], expected[1][..., :4], atol=1e-6)
    plain = Rotary.plain(8, 500.0)(POSITIONS)
    assert not torch.allclose(cos, plain[0], atol=1e-3) or name == "dynamic"  # which scales only longer texts


def test_a_target_without_scaling_gives_none() -> None:
    for family in ("llama", "gemma3", "gpt_neox", "gpt2"):
        shape = DecoderShape()
        shape.fill(make_target(family))
        assert shape.rope_scaling == {} and shape.rope_theta > 0
    target = make_target()
    cos, sin = shape.attention(target, 32).rotation(POSITIONS)
    expected = LlamaRotaryEmbedding(llama(target))(torch.zeros(1), POSITIONS)
    assert torch.allclose(cos[0], expected[0][..., :4], atol=1e-6)
    assert torch.allclose(sin[0], expected[1][..., :4], atol=1e-6)


def test_scaling_follows_the_heads_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    target = scaled("llama3", monkeypatch)
    shape = DecoderShape(head_dim=16)
    shape.fill(target)
    frequencies, _ = rotary.rotary_frequencies(target.config, 16, 500.0, shape.rope_scaling)
    bigger = scaled("llama3", monkeypatch, head_dim=16)
    assert torch.allclose(frequencies, LlamaRotaryEmbedding(llama(bigger)).inv_freq)


def test_a_base_of_its_own_means_no_scaling_but_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    target = scaled("linear", monkeypatch)
    alone = DecoderShape(rope_theta=500.0)  # as in the file of a head from before there was scaling
    alone.fill(target)
    assert alone.rope_scaling == {}
    assert torch.equal(alone.attention(target, 32).rotation(POSITIONS)[0], Rotary.plain(8, 500.0)(POSITIONS)[0])
    own = DecoderShape(rope_scaling={"rope_type": "linear", "factor": 2.0})
    own.fill(target)
    assert (own.rope_theta, own.rope_scaling["factor"]) == (500.0, 2.0)
    cos = own.attention(target, 32).rotation(2 * POSITIONS)[0]
    assert torch.allclose(cos, Rotary.plain(8, 500.0)(POSITIONS)[0], atol=1e-6)


@pytest.mark.parametrize("scaling", [{"rope_type": "spiral"}, {"factor": 2.0}, {"rope_type": "yarn"}])
def test_a_scaling_that_cannot_be_is_named(scaling: dict[str, Any], target: Target) -> None:
    with pytest.raises(UserError, match=r"rope_scaling: (.* does not fit heads of size 8|needs a rope_type)"):
        make_head("eagle3", target, rope_scaling=scaling)


def test_longrope_needs_the_targets_head_size(monkeypatch: pytest.MonkeyPatch) -> None:
    target = scaled("longrope", monkeypatch)
    with pytest.raises(UserError, match=r"heads of size 16.*give head\.options\.rope_theta"):
        make_head("eagle3", target, head_dim=16)
    assert make_head("eagle3", target, head_dim=16, rope_theta=500.0).config.rope_scaling == {}


def test_a_target_that_rotates_a_part_lends_no_factors_of_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    target = scaled("longrope", monkeypatch)
    assert rotary.rope_scaling(target.config)
    target.config.rope_parameters["partial_rotary_factor"] = 0.5
    assert rotary.rope_scaling(target.config) == {}


def test_frequencies_stay_float32_in_a_head_that_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("eagle", scaled("yarn", monkeypatch))
    attention = head.get_submodule("layers.0.self_attn")
    assert isinstance(attention, Attention)
    before = attention.rotation(POSITIONS)
    head.to(torch.bfloat16)
    after = attention.rotation(POSITIONS)
    assert all(torch.equal(one, two) and two.dtype == torch.float32 for one, two in zip(before, after, strict=True))
    assert not any("freq" in name for name in head.state_dict())
