"""Settings and tensors of others that make no head are one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.errors import UserError
from spechead.formats.check import check_folder
from spechead.formats.export import write_export
from spechead.formats.registry import read_head
from tests.helpers.exporting import export_info, make_head, tiny


@pytest.mark.parametrize(
    "form, name, change, message",
    [
        ("vllm", "eagle3", {"num_hidden_layers": 10**7}, "require n_layers 10000000, and the files contain 15 tensors"),
        ("vllm", "eagle", {"num_hidden_layers": 10**7}, "require n_layers 10000000"),
        ("vllm", "eagle3", {"num_attention_heads": 10**9, "head_dim": 10**6}, "q_proj.weight is"),
        ("vllm", "eagle3", {"intermediate_size": 10**11}, "gate_proj.weight is"),
        (
            "tgi",
            "medusa",
            {"medusa_num_heads": 10**9},
            "require n_heads 1000000000, n_layers 1, and the files .* 15",
        ),
        ("tgi", "medusa", {"medusa_num_layers": "(.*)+"}, "medusa_num_layers is .*, and must be a whole number"),
        ("vllm", "medusa", {"num_heads": 4.5}, "n_heads is 4.5, and must be a whole number above 0"),
        ("vllm", "medusa", {"num_hidden_layers": 10**400}, "require n_heads 5, n_layers 1000"),
    ],
)
def test_huge_sizes_are_refused_before_anything_is_built(
    form: str, name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_export(make_head(name, tiny("llama")), form, out, export_info(tiny("llama"), tmp_path))
    config = json.loads((out / "config.json").read_text()) | change
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        read_head(form, out, tiny("llama"))


@pytest.mark.parametrize(
    "dtype, message",
    [
        (torch.int8, "quantised tensors cannot be read: {name} is int8"),
        (torch.uint8, "{name} is uint8"),
        (torch.float8_e4m3fn, "{name} is float8_e4m3fn"),
        (torch.int32, "{name} is int32|{name} is not the target's"),
    ],
)
@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight"])
def test_weights_that_are_no_plain_floats_are_refused(
    name: str, dtype: torch.dtype, message: str, exported: Path, tmp_path: Path
) -> None:
    if name == "lm_head.weight":  # the target's own, in a Medusa head that shares it
        write_export(make_head("medusa-shared", tiny("llama")), "vllm", exported, export_info(tiny("llama"), tmp_path))
    tensors = load_file(exported / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(dtype)}, exported / "model.safetensors")
    with pytest.raises(UserError, match=message.format(name=name)):
        read_head("vllm", exported, tiny("llama"))
    assert any(name in line.text for line in check_folder(exported, tiny("llama")) if not line.ok)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rope_parameters", "architectures"])
@pytest.mark.parametrize("value", ["x", 0, [], {"a": 1}, None])
def test_settings_of_a_wrong_type_are_one_line(key: str, value: Any, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text()) | {key: value}
    (exported / "config.json").write_text(json.dumps(config))
    try:
        read_head("vllm", exported, tiny("llama"))
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert key in ("architectures", "rope_parameters")  # whose absence has a meaning
