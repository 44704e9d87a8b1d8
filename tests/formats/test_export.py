"""`spechead export`, `check` and `import`, from a head's folder to a head's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo
from spechead.formats.export import write_export
from spechead.formats.push import publishable
from tests.helpers.exporting import export_info, make_head, run, tiny
from tests.helpers.targets import make_target


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_there_and_back(kind: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"export --head {tiny_run / kind} --to vllm -o {tmp_path / 'out'} --target-id org/tiny --license apache-2.0")
    shown = capsys.readouterr().out
    assert f'vllm serve org/tiny --speculative-config \'{{"method": "{kind}", "model": "{tmp_path / "out"}"' in shown
    assert '"model": "out"' in (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()
    run(f"check {tmp_path / 'out'} --target {tiny_run / 'target'} --head {tiny_run / kind}")
    assert "checks passed" in capsys.readouterr().out
    run(f"import {tmp_path / 'out'} --target {tiny_run / 'target'} -o {tmp_path / 'back'}")
    exported, imported = (load_file(at / "model.safetensors") for at in (tiny_run / kind, tmp_path / "back"))
    assert exported.keys() == imported.keys() and all(torch.equal(exported[name], imported[name]) for name in exported)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["meta"] == {"imported_from": "vllm"}


def test_a_gguf_head_takes_the_targets_tokenizer(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"export --head {tiny_run / 'eagle3'} --to llama.cpp -o {tmp_path / 'out'}"
    with pytest.raises(SystemExit):
        run(command)
    assert "option target_gguf: is missing" in capsys.readouterr().err
    run(f"{command} --target-gguf {tiny_run / 'target.gguf'}")
    assert "--spec-type draft-eagle3" in capsys.readouterr().out


def test_the_check_fails_with_exit_code_2(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'}")
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace('"norm_output": false', '"norm_output": true'))
    with pytest.raises(SystemExit) as ended:
        run(f"check {tmp_path / 'out'} --target {tiny_run / 'target'}")
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "FAIL  manifest      config.json: norm_output is true, exported false" in shown.out
    assert "checks failed (manifest)" in shown.err


@pytest.mark.parametrize(
    "command, message",
    [
        ("export --head {run}/eagle3 --to vlm -o {tmp}/x", "option to: 'vlm' is not one of vllm, sglang"),
        ("export --head {run}/eagle3 --to vllm -o {tmp}/x --dtype int8", "option dtype: 'int8' is not one of auto"),
        ("export --head {run}/none --to vllm -o {tmp}/x", "no head at"),
        ("export --head {run}/medusa --to tgi -o {tmp}/x", "option target_id: is missing"),
        ("export --head {run}/medusa --to sglang -o {tmp}/x", "SGLang 0.5.23 supports no medusa heads"),
        ("export --head {run}/eagle3 --to vllm -o {tmp}/x --report {run}/data.jsonl", "data.jsonl is not valid JSON"),
        ("import {run}/none --target {run}/target -o {tmp}/x", "no folder"),
        ("import {run}/eagle3 --target {run}/target", "option out: is missing"),
        ("import {run}/eagle3 --target {run}/target -o {run}", "exists; give another folder"),
        ("import {run}/target --target {run}/target -o {tmp}/x", "target as vllm"),
        ("check {run}/none --target {run}/target", "1 of 1 checks failed (files)"),
        ("check {run}/eagle3", "option target: is missing; give --target"),
    ],
)
def test_mistakes_are_one_line(
    command: str, message: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command.format(run=tiny_run, tmp=tmp_path))
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------ the report


# ------------------------------------------------------------------------------------------------ another target


def test_the_printed_check_runs_as_it_stands(
    tiny_run: Path, other_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"export --head {tiny_run / 'medusa'} --to vllm -o {tmp_path / 'out'} --target '{other_target}' --force")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("check it later:  spechead check ") and line.endswith(" --force")
    run(line.partition("spechead ")[2])
    assert "checks passed" in capsys.readouterr().out


def test_a_head_with_an_adapter_is_checked_against_a_merged_target(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'}")
    adapted = tmp_path / "adapted"
    shutil.copytree(tiny_run / "eagle3", adapted)
    config = json.loads((adapted / "config.json").read_text())
    config["target"] |= {"adapter": "org/lora", "fingerprint": "other"}
    (adapted / "config.json").write_text(json.dumps(config))
    for more in ("", f" --target {tiny_run / 'target'}"):
        with pytest.raises(SystemExit):
            run(f"check {tmp_path / 'out'} --head {adapted}{more}")
        assert (
            "adapter 'org/lora', and a server loads the plain target: export with --merged" in capsys.readouterr().err
        )
    run(f"check {tmp_path / 'out'} --head {adapted} --target {tiny_run / 'target'} --force")


def test_what_reads_back_as_another_head_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an exporter mixes up two tensors."""
    from spechead.formats.servers import vllm

    right = vllm.write_files

    def mixed(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors = dict(tensors)
        gate, up = (f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        right(folder, settings, tensors)

    monkeypatch.setattr(vllm, "write_files", mixed)
    with pytest.raises(UserError, match="are not the head: .*gate_proj.weight.*they are removed"):
        write_export(make_head("eagle3", tiny("llama")), "vllm", tmp_path / "out", export_info(tiny("llama"), tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_path_as_the_targets_name_is_not_kept(tmp_path: Path) -> None:
    info = ExportInfo("/home/me/model")
    with pytest.raises(UserError, match="spechead.json: target.name is a path of one machine; they are removed"):
        write_export(make_head("medusa", tiny("llama")), "vllm", tmp_path / "out", info)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_another_target_is_not_kept(tmp_path: Path) -> None:
    target, other = tiny("llama"), make_target("llama")
    other.tokenizer.add_tokens(["<new>"])
    head = make_head("eagle3", other)
    with pytest.raises(UserError, match="97 tokens of 98|tokens of .*: llama.cpp drafts only if"):
        write_export(head, "llama.cpp", tmp_path / "out", export_info(target, tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_template_of_the_training_goes_along(tmp_path: Path) -> None:
    target = make_target()
    text = "{{ messages[0].content }}"
    target.tokenizer.chat_template = {"default": target.tokenizer.chat_template, "brief": text}
    head = make_head("medusa", target)
    for name, given in (("named", "brief"), ("given", text)):
        meta = {"chat_template": given, "template_date": "2024-07-01"}
        write_export(head, "vllm", tmp_path / name, export_info(target, tmp_path), meta)
        assert (tmp_path / name / "chat_template.jinja").read_text() == text
        assert "printed 2024-07-01 as the date" in (tmp_path / name / "README.md").read_text()
        assert "chat_template.jinja" in [path.name for path in publishable(tmp_path / name)]
    with pytest.raises(UserError, match="target 'tiny-llama' has no chat template 'long', with which the head was"):
        write_export(head, "vllm", tmp_path / "none", export_info(target, tmp_path), {"chat_template": "long"})
    assert not (tmp_path / "none").exists()
