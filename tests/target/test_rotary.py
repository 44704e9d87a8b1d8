"""Rotary positions as configs of transformers describe them; scalings in heads are tested with their attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from spechead.errors import UserError
from spechead.target.rotary import rope_scaling, rope_theta, rotary_frequencies


def test_the_base_is_read_from_old_and_new_configs() -> None:
    assert rope_theta(transformers.LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500.0})) == 500.0
    assert rope_theta(SimpleNamespace(rope_theta=7.0)) == 7.0 and rope_theta(SimpleNamespace()) == 10000.0


def test_two_kinds_of_layers_give_those_of_full_attention() -> None:
    full = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    config = SimpleNamespace(rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 1e4}})
    assert rope_theta(config) == 1e6 and rope_scaling(config) == {"rope_type": "linear", "factor": 4.0}


def test_factors_of_single_dimensions_need_all_dimensions() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0], "partial_rotary_factor": 0.5}
    assert rope_scaling(SimpleNamespace(rope_parameters=longrope)) == {}
    assert rope_scaling(SimpleNamespace(rope_parameters={"rope_type": "default"})) == {}


def test_frequencies_by_hand() -> None:
    config = transformers.LlamaConfig()
    frequencies, factor = rotary_frequencies(config, 4, 100.0, {"rope_type": "linear", "factor": 2.0})
    assert torch.allclose(frequencies, torch.tensor([0.5, 0.05])) and factor == 1.0
    with pytest.raises(UserError, match=r"option head\.options\.rope_scaling: needs a rope_type, one of"):
        rotary_frequencies(config, 4, 100.0, {"factor": 2.0})
