"""Files of others are read with distrust, and exports are written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.errors import UserError
from spechead.formats.check import check_folder
from spechead.formats.export import write_export
from spechead.formats.files import absolute_paths, new_folder, read_config, read_weights
from spechead.formats.gguf_file import read_gguf
from spechead.formats.push import publishable
from spechead.formats.registry import FORMATS, detect, read_head
from tests.helpers.exporting import export_info, make_head, tiny


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    write_export(make_head("eagle3", tiny("llama")), "vllm", out, export_info(tiny("llama"), tmp_path))
    return out


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/spechead-test-pickle-ran",)


# ------------------------------------------------------------------------------------------------ reading


def test_a_truncated_file_is_one_line(exported: Path) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors: damaged or no safetensors file"):
        read_weights(exported)
    lines = list(check_folder(exported, tiny("llama")))
    assert not lines[-1].ok and "\n" not in lines[-1].text


def test_a_truncated_gguf_file_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_export(make_head("eagle3", tiny("llama")), "llama.cpp", out, export_info(tiny("llama"), tmp_path))
    path = out / "model.gguf"
    whole = path.read_bytes()
    for length in (2, 100, 5000, len(whole) - 500):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="model.gguf: damaged or no GGUF file"):
            read_gguf(path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_does_not_run(name: str, exported: Path) -> None:
    (exported / "model.safetensors").unlink()
    (exported / name).write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(UserError, match="damaged"):
        read_weights(exported)
    torch.save({"fc.weight": Evil()}, exported / name)
    with pytest.raises(UserError, match="damaged") as told:
        read_weights(exported)
    assert "weights_only" not in str(told.value), "torch's advice runs the code"
    assert not Path("/tmp/spechead-test-pickle-ran").exists()


def test_a_pickle_beside_the_weights_fails_the_check(exported: Path) -> None:
    torch.save({}, exported / "pytorch_model.bin")
    told = [str(line) for line in check_folder(exported, tiny("llama")) if not line.ok]
    assert told[0].startswith("FAIL  files         pytorch_model.bin: pickled files can run code")


@pytest.mark.parametrize("text", ["[1]", "null", "{", "[" * 100000, "\xff"])
def test_what_is_no_configuration_is_one_line(text: str, exported: Path) -> None:
    (exported / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="config.json"):
        read_config(exported / "config.json")


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rope_parameters", "architectures"])
@pytest.mark.parametrize("value", ["x", 0, [], {"a": 1}, None])
def test_settings_of_a_wrong_kind_are_one_line(key: str, value: Any, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text()) | {key: value}
    (exported / "config.json").write_text(json.dumps(config))
    try:
        read_head("vllm", exported, tiny("llama"))
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert key in ("architectures", "rope_parameters")  # whose absence has a meaning


@pytest.mark.parametrize("depth", [100, 480, 700, 900, 960, 2000, 100000])
def test_nesting_of_any_depth_is_at_most_one_line(depth: int, exported: Path) -> None:
    (exported / "config.json").write_text('{"a":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(UserError):
        read_head("vllm", exported, tiny("llama"))
    with pytest.raises(UserError):
        publishable(exported)
    assert not all(line.ok for line in check_folder(exported, tiny("llama"), make_head("eagle3", tiny("llama"))))
    if depth >= 2000:
        with pytest.raises(UserError, match="nested too deeply"):
            read_config(exported / "config.json")


@pytest.mark.parametrize(
    "dtype, told",
    [
        (torch.int8, "quantised tensors cannot be read: {name} is int8"),
        (torch.uint8, "{name} is uint8"),
        (torch.float8_e4m3fn, "{name} is float8_e4m3fn"),
        (torch.int32, "{name} is int32|{name} is not the target's"),
    ],
)
@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight"])
def test_weights_that_are_no_plain_floats_are_refused(
    name: str, dtype: torch.dtype, told: str, exported: Path, tmp_path: Path
) -> None:
    if name == "lm_head.weight":  # the target's own, in a Medusa head that shares it
        write_export(make_head("medusa-shared", tiny("llama")), "vllm", exported, export_info(tiny("llama"), tmp_path))
    tensors = load_file(exported / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(dtype)}, exported / "model.safetensors")
    with pytest.raises(UserError, match=told.format(name=name)):
        read_head("vllm", exported, tiny("llama"))
    assert any(name in line.text for line in check_folder(exported, tiny("llama")) if not line.ok)


@pytest.mark.parametrize(
    "form, name, change, told",
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
def test_sizes_without_end_are_refused_before_anything_is_made(
    form: str, name: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_export(make_head(name, tiny("llama")), form, out, export_info(tiny("llama"), tmp_path))
    config = json.loads((out / "config.json").read_text()) | change
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=told):
        read_head(form, out, tiny("llama"))


# ------------------------------------------------------------------------------------------------ others' files


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
    ours, theirs = head.state_dict(), back.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_medusa_project_has_five_heads(tmp_path: Path) -> None:
    target, head, out = tiny("llama"), make_head("medusa-three", tiny("llama")), tmp_path / "out"
    with pytest.raises(
        UserError, match=r"n_heads: 3 cannot be exported: Medusa.s from_pretrained builds 5 heads"
    ):
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


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("form", FORMATS)
def test_no_path_of_this_machine_is_written(form: str, tmp_path: Path) -> None:
    name = "medusa" if form in ("medusa", "tgi") else "eagle3"
    out = tmp_path / "somewhere" / "out"
    meta = {"data": [str(tmp_path / "mine.jsonl")], "steps": 7}
    write_export(make_head(name, tiny("llama")), form, out, export_info(tiny("llama"), tmp_path), meta)
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
    card = (out / "README.md").read_text()
    assert "base_model: org/model" in card and "mine.jsonl" in card and FORMATS[form].SERVER in card


def test_absolute_paths_are_found_anywhere() -> None:
    value = {"a": "/home/me", "b": {"c": ["x", "~/y", "C:\\z"]}, "d": "org/model", "e": "/", "f": "a /b"}
    assert absolute_paths(value) == ["a", "b.c", "b.c"]


def test_an_export_replaces_an_export_alone(exported: Path, tmp_path: Path) -> None:
    target, told = tiny("llama"), export_info(tiny("llama"), tmp_path)
    write_export(make_head("medusa", target), "vllm", exported, told)
    assert "medusa" in (exported / "config.json").read_text()
    mine = tmp_path / "mine"
    mine.mkdir()
    write_export(make_head("medusa", target), "vllm", mine, told)  # an empty folder is nobody's
    (mine / "spechead.json").unlink()
    with pytest.raises(UserError, match="mine exists and is no export of spechead"):
        write_export(make_head("medusa", target), "vllm", mine, told)
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(UserError, match="file exists and is no export"):
        write_export(make_head("medusa", target), "vllm", file, told)
    assert file.read_text() == "kept"


def test_a_failure_leaves_the_export_before_it(exported: Path) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(RuntimeError, match="half way"), new_folder(exported) as scratch:
        (scratch / "config.json").write_text("{}")
        raise RuntimeError("half way")
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir() if path.name.startswith(".")] == []


def test_what_reads_back_as_another_head_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an exporter mixes up two tensors."""
    from spechead.formats.servers import vllm

    right = vllm.write_tensors

    def mixed(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        tensors = dict(tensors)
        gate, up = (f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        right(path, tensors)

    monkeypatch.setattr(vllm, "write_tensors", mixed)
    with pytest.raises(UserError, match="are not the head: .*gate_proj.weight.*they are removed"):
        write_export(make_head("eagle3", tiny("llama")), "vllm", tmp_path / "out", export_info(tiny("llama"), tmp_path))
    assert not (tmp_path / "out").exists()


def test_weights_that_share_memory_are_written_each(tmp_path: Path) -> None:
    from spechead.heads.files import write_tensors

    one = torch.arange(4.0)
    write_tensors(tmp_path / "x.safetensors", {"a": one, "b": one[:2], "c": one.view(2, 2).T})
    back = load_file(tmp_path / "x.safetensors")
    assert back["c"].tolist() == [[0, 2], [1, 3]] and back["b"].tolist() == [0, 1]
    save_file(back, tmp_path / "y.safetensors")


@pytest.mark.parametrize("key, value", [("files", []), ("files", {"config.json": 1}), ("target", None), ("target", {})])
def test_a_damaged_record_is_one_line(key: str, value: Any, exported: Path) -> None:
    record = json.loads((exported / "spechead.json").read_text()) | {key: value}
    (exported / "spechead.json").write_text(json.dumps(record))
    lines = list(check_folder(exported, tiny("llama")))
    assert [line.ok for line in lines] == [False] and "no manifest of an export" in lines[0].text
