"""Every head that a format carries comes back bit for bit, and every other is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spechead.errors import UserError
from spechead.formats.export import write_export
from spechead.formats.registry import detect, read_head
from tests.helpers.exporting import export_info, make_head, run, tiny

# ------------------------------------------------------------------------------------------------ conversions


def test_files_of_other_trainers(tmp_path: Path, exported: Path) -> None:
    """Layers by number, a vocabulary by frequency, no t2d, an embedding, torch's own file."""
    target, head = tiny("llama"), make_head("eagle3", tiny("llama"))
    tensors = load_file(exported / "model.safetensors")
    del tensors["t2d"]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(40) + tensors["d2t"])[order]
    tensors["d2t"], tensors["lm_head.weight"] = ids - torch.arange(40), tensors["lm_head.weight"][order]
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach()
    other = tmp_path / "other"
    other.mkdir()
    torch.save(tensors, other / "pytorch_model.bin")
    config = json.loads((exported / "config.json").read_text())
    del config["rope_parameters"], config["norm_output"], config["eagle_aux_hidden_state_layer_ids"]
    (other / "config.json").write_text(json.dumps(config))
    assert detect(other) == "vllm"
    _, back = read_head("vllm", other, target)
    expected, imported = head.state_dict(), back.state_dict()
    assert all(torch.equal(expected[name], imported[name]) for name in expected)


@pytest.mark.parametrize(
    "form, name, key, value, why",
    [
        ("sglang", "eagle3", "norm_before_residual", True, "SGLang ignores it"),
        ("trtllm", "eagle3", "norm_before_fc", True, "differs inside eagle_config"),
        ("eagle", "eagle3", "norm_output", True, "EAGLE ignores it"),
        ("tgi", "medusa", "architectures", ["Medusa"], "serves without this head"),
        ("vllm", "medusa", "medusa_fc_bias", False, "ignores the biases"),
        ("speculators", "eagle3", "norm_before_residual", None, ""),
    ],
)
def test_what_a_server_would_misread_is_no_head(
    form: str, name: str, key: str, value: Any, why: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_export(make_head(name, tiny("llama")), form, out, export_info(tiny("llama"), tmp_path))
    config = json.loads((out / "config.json").read_text())
    if value is None:  # speculators: on, where it is not said
        del config[key]
        (out / "config.json").write_text(json.dumps(config))
        assert read_head(form, out, tiny("llama"))[1].config.norm_before_residual is True
        return
    (out / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=why):
        read_head(form, out, tiny("llama"))


def test_an_export_for_another_target_is_imported_by_force_alone(
    tiny_run: Path, other_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"export --head {tiny_run / 'medusa'} --to vllm -o {tmp_path / 'out'} --target-id org/tiny")
    command = f"import {tmp_path / 'out'} --target '{other_target}' -o {tmp_path / 'back'}"
    with pytest.raises(SystemExit):
        run(command)
    assert "was exported for target 'org/tiny'; the weights of" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    run(f"{command} --force")
    assert (tmp_path / "back" / "model.safetensors").is_file()
    (tmp_path / "out" / "spechead.json").unlink()  # files of others say nothing of weights
    run(command.replace("back", "again"))


def test_a_changed_export_is_imported_by_force_alone(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'}")
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace('"norm_output": false', '"norm_output": true'))
    command = f"import {tmp_path / 'out'} --target {tiny_run / 'target'} -o {tmp_path / 'back'}"
    with pytest.raises(SystemExit):
        run(command)
    shown = capsys.readouterr().err
    assert "is not what was exported: config.json: norm_output is true, exported false" in shown and "--force" in shown
    assert not (tmp_path / "back").exists()
    run(f"{command} --force")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["config"]["norm_output"] is True
