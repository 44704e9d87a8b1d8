"""The layout that servers share: what is refused, scaled positions, and draft vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.export import write_export
from spechead.heads import HEADS, Head
from tests.helpers.exporting import LLAMA3, export_info, make_head, tiny


def with_scaling(scaling: dict[str, Any], kind: str = "eagle3") -> Head:
    torch.manual_seed(1)
    config = HEADS[kind].Config(draft_vocab_size=40 if kind == "eagle3" else 0, rope_theta=1e4, rope_scaling=scaling)
    head = HEADS[kind](config, tiny("llama"))
    if head.reduced:
        head.set_vocabulary(torch.arange(40) * 2 + 1)
    return head.eval().requires_grad_(False)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


DOUBLE = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_a_tap_of_the_last_state_is_refused(form: str, tmp_path: Path) -> None:
    target = tiny("llama")
    head = make_head("eagle3", target)
    head.config.layers = [1, 3, target.n_layers]
    with pytest.raises(UserError, match=r"layers: \[1, 3, 7\] cannot be exported.*\[7\] is another state there"):
        write_export(head, form, tmp_path / "out", export_info(target, tmp_path))


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators", "trtllm", "eagle", "llama.cpp"])
@pytest.mark.parametrize(
    "scaling, why",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic': servers compute it otherwise"),
        (YARN | {"attention_factor": 0.5}, "yarn has attention_factor: servers do not read it"),
    ],
)
def test_positions_that_servers_compute_otherwise_are_refused(
    form: str, scaling: dict[str, Any], why: str, tmp_path: Path
) -> None:
    head = with_scaling(scaling)
    why = f"^rope_scaling .*{why}|^option head.options.rope_scaling"  # where no scaling at all is carried
    with pytest.raises(UserError, match=why):
        write_export(head, form, tmp_path / "out", export_info(tiny("llama"), tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("factor", [0, -2.0, None, "4", True, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_factors_are_above_0(kind: str, factor: Any) -> None:
    with pytest.raises(UserError, match=f"rope_scaling {kind} gives no factor above 0"):
        eagle_layout.refuse_unknown_scaling((YARN if kind == "yarn" else DOUBLE) | {"factor": factor})


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators", "trtllm"])
@pytest.mark.parametrize("kind", ["rope_type yarn", "rope_type llama3"])
def test_the_length_that_a_scaling_stretches_is_written(form: str, kind: str, tmp_path: Path) -> None:
    """Servers stop without it; transformers takes the target's longest text."""
    scaling = {key: value for key, value in (YARN if "yarn" in kind else LLAMA3).items() if "original" not in key}
    head, out = with_scaling(scaling), tmp_path / "out"
    write_export(head, form, out, export_info(tiny("llama"), tmp_path))
    config = json.loads((out / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    assert config["rope_scaling"] == scaling | {"original_max_position_embeddings": 256}
    assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 1e4}
    del config["rope_scaling"]["original_max_position_embeddings"]
    with pytest.raises(UserError, match="gives no original_max_position_embeddings above 0: servers stop at load"):
        eagle_layout.layer_options(config | {"rope_parameters": {}})


@given(data=st.data(), total=st.integers(3, 30))
@settings(max_examples=40, deadline=None)
def test_a_draft_vocabulary_in_any_order_is_sorted_with_its_rows(data: st.DataObject, total: int) -> None:
    ids = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=total, unique=True))
    size = len(ids)
    offsets = torch.tensor(ids) - torch.arange(size)
    rows = torch.tensor(ids).float()[:, None]  # each row says whose it is
    found = eagle_layout._with_vocabulary({"d2t": offsets, "lm_head.weight": rows}, size, total)
    sorted_ids = torch.arange(size) + found["d2t"]
    assert sorted_ids.tolist() == sorted(ids)
    assert found["lm_head.weight"][:, 0].tolist() == sorted(ids)
    assert found["t2d"].nonzero()[:, 0].tolist() == sorted(ids)


@pytest.mark.parametrize(
    "config, found",
    [
        ({"rope_theta": 5e5}, (5e5, {})),
        ({}, (1e4, {})),
        ({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}, (2e4, {})),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, (2e4, DOUBLE)),
        ({"rope_parameters": {"rope_theta": 2e4} | DOUBLE}, (2e4, DOUBLE)),
    ],
)  # fmt: skip
def test_rotary_positions_in_old_and_new_words(config: dict[str, Any], found: tuple[float, dict[str, Any]]) -> None:
    assert eagle_layout.rotary_of(config) == found


def test_rotary_positions_of_a_part_are_refused() -> None:
    with pytest.raises(UserError, match="partial_rotary_factor is 0.5: heads here rotate all"):
        eagle_layout.rotary_of({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})
    assert eagle_layout.rotary_of({"partial_rotary_factor": 1.0, "rope_theta": 5.0}) == (5.0, {})


def test_rotary_positions_that_disagree_are_refused() -> None:
    with pytest.raises(UserError, match=r"rope_theta is 10000.0, but 20000.0 in rope_parameters"):
        eagle_layout.rotary_of({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}})
    with pytest.raises(UserError, match="rope_scaling is"):
        eagle_layout.rotary_of({"rope_scaling": DOUBLE | {"factor": 4.0}, "rope_parameters": DOUBLE})
