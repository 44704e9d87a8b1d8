"""`spechead export`, `check` and `import`, from a head's folder to a head's folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from exporting import make_head, write_tokenizer
from safetensors.torch import load_file
from training import write_tiny

from spechead.cli import main
from spechead.formats.native import save_head
from spechead.target import Target


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved target, and a head for it in each of three kinds."""
    root = write_tiny(tmp_path_factory.mktemp("run"))
    target = Target.load(str(root / "target"), device="cpu", pack=False)
    write_tokenizer(target, root / "target.gguf")
    for name in ("eagle3", "eagle", "medusa"):
        save_head(make_head(name, target), root / name, {"data": [str(root / "data.jsonl")], "steps": 3})
    return root


def run(command: str) -> None:
    main(shlex.split(command))


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
    ours, theirs = (load_file(at / "model.safetensors") for at in (tiny_run / kind, tmp_path / "back"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["meta"] == {"imported_from": "vllm"}


def test_a_gguf_head_takes_the_targets_tokenizer(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"export --head {tiny_run / 'eagle3'} --to llama.cpp -o {tmp_path / 'out'}"
    with pytest.raises(SystemExit):
        run(command)
    assert "option target-gguf is missing" in capsys.readouterr().err
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
    assert "FAIL  record        config.json: norm_output is true, exported false" in shown.out
    assert "checks failed (record)" in shown.err


@pytest.mark.parametrize(
    "command, told",
    [
        ("export --head {run}/eagle3 --to vlm -o {tmp}/x", "format 'vlm' is not one of vllm, sglang"),
        ("export --head {run}/eagle3 --to vllm -o {tmp}/x --dtype int8", "dtype 'int8' is not one of auto"),
        ("export --head {run}/none --to vllm -o {tmp}/x", "no head at"),
        ("export --head {run}/medusa --to tgi -o {tmp}/x", "give --target-id"),
        ("export --head {run}/medusa --to sglang -o {tmp}/x", "SGLang 0.5.23 has no medusa heads"),
        ("export --head {run}/eagle3 --to vllm -o {tmp}/x --report {run}/data.jsonl", "data.jsonl is not valid JSON"),
        ("import {run}/none --target {run}/target -o {tmp}/x", "no folder"),
        ("import {run}/eagle3 --target {run}/target", "option out is missing"),
        ("import {run}/eagle3 --target {run}/target -o {run}", "exists; give another folder"),
        ("import {run}/target --target {run}/target -o {tmp}/x", "target as vllm"),
        ("check {run}/none --target {run}/target", "1 of 1 checks failed (files)"),
        ("check {run}/eagle3", "no target: give --target"),
    ],
)
def test_mistakes_are_one_line(
    command: str, told: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command.format(run=tiny_run, tmp=tmp_path))
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert told in shown and len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_the_card_shows_the_report(tiny_run: Path, tmp_path: Path) -> None:
    entry = {
        "tree": "chain:3",
        "prompts": 40,
        "acceptance_length": 1.9,
        "acceptance_length_ci": [1.75, 2.03],
        "speedup": 1.3,
        "speedup_ci": [1.2, 1.37],
        "plain_tokens_per_s": 44.1,
        "speculative_tokens_per_s": 57.1,
        "lossless": {"equal": 40, "checked": 40},
    }
    report = {"dtype": "float32", "machine": {"processor": "EPYC"}, "suites": {"held_out": entry}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'} --report {tmp_path / 'report.json'}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| chain:3 | 1.90 [1.75, 2.03] | x1.30 [1.20, 1.37] | 44.1 -> 57.1 | 40/40 |" in card
