"""The Medusa project: five heads, numbered tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from spechead.formats.export import write_export
from spechead.formats.registry import detect, read_head
from tests.helpers.exporting import export_info, make_head, tiny


def test_the_medusa_project_has_five_heads(tmp_path: Path) -> None:
    target, head, out = tiny("llama"), make_head("medusa-three", tiny("llama")), tmp_path / "out"
    with pytest.raises(UserError, match=r"n_heads: 3 cannot be exported: Medusa.s from_pretrained builds 5 heads"):
        write_export(head, "medusa", out, export_info(target, tmp_path))
    write_export(head, "tgi", out, export_info(target, tmp_path))
    assert read_head("tgi", out, target)[1].config.n_heads == 3
    with pytest.raises(UserError, match="medusa_num_heads is 3: .*--format tgi"):
        read_head("medusa", out, target)


def test_medusa_files_of_the_project(tmp_path: Path) -> None:
    target, head = tiny("llama"), make_head("medusa", tiny("llama"))
    tensors = {}
    for k in range(5):
        tensors[f"{k}.0.linear.weight"] = head.get_parameter(f"blocks.{k}.0.linear.weight")
        tensors[f"{k}.0.linear.bias"] = head.get_parameter(f"blocks.{k}.0.linear.bias")
        tensors[f"{k}.1.weight"] = head.get_parameter(f"lm_heads.{k}.weight")
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    settings = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "org/model"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert detect(tmp_path) == "medusa"
    _, back = read_head("medusa", tmp_path, target)
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in head.state_dict().items())
