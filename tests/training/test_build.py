"""What a recipe builds: samples, head and module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spechead.training.build import bare_head, computes_bf16, load_data, load_target, make_module
from spechead.training.distributed import Ranks
from spechead.training.joint import JointModule
from spechead.training.module import FeatureCache, TrainingModule
from tests.helpers.training import recipe

FIRST, SECOND = (Ranks(rank, 2, torch.device("cpu")) for rank in (0, 1))


def test_samples_are_split_alike_and_reported_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "data.jsonl"
    foreign = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    silent = {"messages": [{"role": "user", "content": "long " * 99}, {"role": "assistant", "content": "a"}]}
    source.write_text((folder / "data.jsonl").read_text() + f"{json.dumps(foreign)}\n{json.dumps(silent)}\n")
    settings = recipe(folder, tmp_path, **{"data.train": source, "data.max_length": 99})
    target = load_target(settings, bf16=False)
    data = [load_data(settings, target, ranks) for ranks in (FIRST, SECOND)]
    rows = [([s.row for s in one.training], [s.row for s in one.validation]) for one in data]
    assert rows[0] == rows[1] and sorted(rows[0][0] + rows[0][1]) == list(range(13))
    assert sum(data[0].dropped.values()) == 1 and data[0].foreign.startswith("2 of 14 answers")
    printed = capsys.readouterr().out
    assert printed.count("data: 1 of 14 conversations") == printed.count("data: 2 of 14 answers") == 1


def test_the_module_of_a_recipe(folder: Path, tmp_path: Path) -> None:
    plain = recipe(folder, tmp_path, "medusa", **{"head.tree": "chain:2"})
    target = load_target(plain, bf16=False)
    assert str(bare_head(plain, target).tree) == "chain:2"
    samples = load_data(plain, target, FIRST).training
    module = make_module(plain, target, samples, FeatureCache(0), 8)
    assert type(module) is TrainingModule and module.adapter is None and target.packed
    both = recipe(folder, tmp_path, "medusa", **{"adapter.peft": "{r: 2, target_modules: [q_proj]}"})
    target = load_target(both, bf16=False)
    joint = make_module(both, target, samples, FeatureCache(0), 8)
    assert isinstance(joint, JointModule) and joint.alone == 4 and not target.packed
    for name, tensor in module.head.state_dict().items():
        assert tensor.shape == joint.head.state_dict()[name].shape


def test_precision_of_the_arithmetic() -> None:
    cpu = torch.device("cpu")
    assert computes_bf16("bf16", cpu) and not computes_bf16("float32", cpu)
