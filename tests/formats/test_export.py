"""`spechead export`, `check` and `import`, from a head's folder to a head's folder."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spechead.cli.main import main
from spechead.heads.files import save_head
from spechead.target.model import Target
from tests.helpers.exporting import make_head, write_tokenizer
from tests.helpers.targets import make_target
from tests.helpers.training import write_tiny


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
    "command, told",
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
    command: str, told: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command.format(run=tiny_run, tmp=tmp_path))
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert told in shown and len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------ the report

MEASURED = {
    "tree": "chain:3",
    "prompts": 40,
    "acceptance_length": 1.9,
    "acceptance_length_ci": [1.75, 2.03],
    "speedup": 1.3,
    "speedup_ci": [1.2, 1.37],
    "plain_tokens_per_s": 44.1,
    "speculative_tokens_per_s": 57.1,
    "rule": "exact_match",
    "lossy": False,
    "lossless": {"equal": 40, "checked": 40},
}


def write_report(path: Path, head: Path | str, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    suites = {"held_out": MEASURED | changes}
    report = {"head": str(head), "dtype": "float32", "machine": {"processor": "EPYC"}, "suites": suites}
    path.write_text(json.dumps(report))
    return path


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_card_shows_the_report(tiny_run: Path, tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", tiny_run / "eagle3")
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'} --report {report}")
    card = card_of(tmp_path / "out")
    assert "| chain:3 | 1.90 [1.75, 2.03] | x1.30 [1.20, 1.37] | 44.1 -> 57.1 | 40/40 |" in card
    assert "LOSSY" not in card and "(lossy)" not in card


def test_numbers_of_a_lossy_rule_are_marked(tiny_run: Path, tmp_path: Path) -> None:
    lossy = {"rule": "typical", "lossy": True, "lossless": {"equal": 0, "checked": 0}}
    report = write_report(tmp_path / "report.json", tiny_run / "eagle3", **lossy)
    run(f"export --head {tiny_run / 'eagle3'} --to vllm -o {tmp_path / 'out'} --report {report}")
    card = card_of(tmp_path / "out")
    assert "| chain:3 (lossy) | 1.90" in card and "| lossy |" in card and "0/0" not in card
    assert "**LOSSY: under the rule typical the text does not follow the target's distribution.**" in card


def test_the_report_is_that_of_the_head(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's later head lies beside its final one, and only the final one's report lies in RUN/eval."""
    final, early = tmp_path / "run" / "head", tmp_path / "run" / "head-step-500"
    for head in (final, early):
        shutil.copytree(tiny_run / "medusa", head)
    report = write_report(tmp_path / "run" / "eval" / "report.json", final)
    for head, shown in ((final, True), (early, False)):
        run(f"export --head {head} --to vllm -o {tmp_path / 'out'}")
        assert ("| chain:3 |" in card_of(tmp_path / "out")) is shown
        assert "shows no report" not in capsys.readouterr().err
    write_report(early / "eval" / "report.json", early, tree="chain:2")
    run(f"export --head {early} --to vllm -o {tmp_path / 'out'}")
    assert "| chain:2 |" in card_of(tmp_path / "out")

    write_report(early / "eval" / "report.json", final)
    run(f"export --head {early} --to vllm -o {tmp_path / 'out'}")
    assert f"report.json measures the head {final}, not {early}" in capsys.readouterr().err
    assert "Not measured" in card_of(tmp_path / "out")
    for path, told in ((report, f"the head {final}"), (write_report(tmp_path / "none.json", ""), "no head")):
        with pytest.raises(SystemExit):
            run(f"export --head {early} --to vllm -o {tmp_path / 'x'} --report {path}")
        assert f"option report: {path} measures {told}, not {early}; measure this one" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------ another target


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, with other weights."""
    folder, target = tmp_path_factory.mktemp("other target"), make_target(seed=1)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def test_the_printed_check_runs_as_it_stands(
    tiny_run: Path, other_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"export --head {tiny_run / 'medusa'} --to vllm -o {tmp_path / 'out'} --target '{other_target}' --force")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("check it later:  spechead check ") and line.endswith(" --force")
    run(line.partition("spechead ")[2])
    assert "checks passed" in capsys.readouterr().out


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
