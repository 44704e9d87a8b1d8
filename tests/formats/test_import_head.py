"""Every head that a format carries comes back bit for bit, and every other is refused by name."""

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
from spechead.formats.check import check_folder
from spechead.formats.export import write_export
from spechead.formats.registry import FORMATS, detect
from spechead.formats.servers.llama_cpp import _halves, _pairs, _shortest
from spechead.heads import HEADS, Head
from tests.helpers.exporting import FAMILIES, HEADS_TO_EXPORT, LLAMA3, SUPPORTED, export_info, make_head, tiny

STORED_ROWS_ALONE = {"sglang", "eagle", "trtllm"}  # embed with them, whatever the files hold

REFUSED = r"option head\.options|heads in this format|EAGLE supports only|scales its embeddings"
FEW = ("eagle3", "eagle3-all-tokens", "eagle-layers", "medusa", "medusa-shared")  # on families but llama


def supports(form: str, family: str, name: str) -> bool:
    if name not in SUPPORTED[form]:
        return False
    if family == "gemma3" and form in STORED_ROWS_ALONE:
        return name.startswith("medusa")
    return not (form == "eagle" and name in ("eagle", "eagle-layers") and family == "qwen3-wide-heads")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMATS)
def test_heads_come_back_bit_for_bit_or_are_refused(form: str, family: str, tmp_path: Path) -> None:
    target = tiny(family)
    for name in HEADS_TO_EXPORT if family == "llama" else FEW:
        head, out = make_head(name, target), tmp_path / name
        if not supports(form, family, name):
            with pytest.raises(
                UserError, match=REFUSED
            ):
                write_export(head, form, out, export_info(target, tmp_path))
            assert not out.exists()
            continue
        write_export(head, form, out, export_info(target, tmp_path))
        assert name in FORMATS[form].serve_command(head, name, export_info(target, tmp_path))
        assert detect(out) == form
        back = FORMATS[form].load(out, target).head(target)
        ours, theirs = head.state_dict(), back.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert type(back) is type(head)
        lines = list(check_folder(out, target, head))
        assert [str(line) for line in lines if not line.ok] == []
        assert {"files", "manifest", "target", "contents", "weights", "forward"} <= {line.name for line in lines}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_half_precision_is_the_heads_rounded(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = tiny("llama")
    name = next(name for name in HEADS_TO_EXPORT if name in SUPPORTED[form])
    head = make_head(name, target)
    write_export(head, form, tmp_path / "out", export_info(target, tmp_path, dtype))
    back = FORMATS[form].load(tmp_path / "out", target)
    for key, tensor in back.tensors.items():
        assert torch.equal(tensor, head.state_dict()[key].to(tensor.dtype))
        assert tensor.dtype in (dtype, torch.int64, torch.bool) or (form == "llama.cpp" and tensor.dim() == 1)
    assert all(line.ok for line in check_folder(tmp_path / "out", target, head))


@pytest.mark.parametrize("form", FORMATS)
def test_an_option_that_the_format_does_not_know_is_refused(form: str, tmp_path: Path) -> None:
    from dataclasses import dataclass

    target = tiny("llama")
    name = next(name for name in HEADS_TO_EXPORT if name in SUPPORTED[form])
    head = make_head(name, target)

    @dataclass
    class Newer(type(head).Config):  # type: ignore[name-defined,misc]
        depth_bias: float = 0.0

    head.config = Newer(**vars(head.config))
    write_export(head, form, tmp_path / "unused", export_info(target, tmp_path))
    head.config.depth_bias = 0.5
    with pytest.raises(
        UserError,
        match=r"depth_bias: 0\.5 cannot be exported: the export to .* does not know this",
    ):
        write_export(head, form, tmp_path / "used", export_info(target, tmp_path))
    assert not (tmp_path / "used").exists()


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_a_tap_of_the_last_state_is_refused(form: str, tmp_path: Path) -> None:
    target = tiny("llama")
    head = make_head("eagle3", target)
    head.config.layers = [1, 3, target.n_layers]
    with pytest.raises(UserError, match=r"layers: \[1, 3, 7\] cannot be exported.*\[7\] is another state there"):
        write_export(head, form, tmp_path / "out", export_info(target, tmp_path))


def test_a_target_with_an_adapter_is_refused(tmp_path: Path) -> None:
    target = tiny("llama")
    head = make_head("eagle3", target)
    target.adapter = "org/lora"
    try:
        with pytest.raises(UserError, match="adapter 'org/lora'.*export with --merged-target FOLDER"):
            write_export(head, "vllm", tmp_path / "out", export_info(target, tmp_path))
    finally:
        target.adapter = ""


def with_scaling(scaling: dict[str, Any], kind: str = "eagle3") -> Head:
    torch.manual_seed(1)
    config = HEADS[kind].Config(draft_vocab_size=40 if kind == "eagle3" else 0, rope_theta=1e4, rope_scaling=scaling)
    head = HEADS[kind](config, tiny("llama"))
    if head.reduced:
        head.set_vocabulary(torch.arange(40) * 2 + 1)
    return head.eval().requires_grad_(False)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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


# ------------------------------------------------------------------------------------------------ conversions


@given(heads=st.integers(1, 5), half=st.integers(1, 4), inputs=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_pairs_and_halves_are_inverse(heads: int, half: int, inputs: int) -> None:
    rows = torch.arange(heads * 2 * half * inputs).view(-1, inputs)
    pairs = _pairs(rows, heads)
    assert torch.equal(_halves(pairs, heads), rows)
    for head in range(heads):  # first of a half, then its partner of the other half
        ours, theirs = (x.view(heads, 2 * half, inputs)[head] for x in (rows, pairs))
        assert torch.equal(theirs[0::2], ours[:half])
        assert torch.equal(theirs[1::2], ours[half:])


@given(st.sampled_from([1e-5, 1e-6, 1e-12, 10000.0, 5e5, 1e6, 150000.0, 0.3]))
def test_a_float32_is_read_as_the_decimal_it_was(value: float) -> None:
    assert _shortest(float(torch.tensor(value, dtype=torch.float32))) == value


DOUBLE = {"rope_type": "linear", "factor": 2.0}


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
