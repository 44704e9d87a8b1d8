"""What a recipe builds: samples, head and module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch

from spechead.data.dataset import Sample, digest
from spechead.data.preparation import prepare as module
from spechead.data.preparation.prepare import prepare
from spechead.errors import UserError
from spechead.target.model import Target
from spechead.training.build import bare_head, computes_bf16, load_data, load_target, make_module, preparation_of
from spechead.training.distributed import Ranks
from spechead.training.joint import JointModule
from spechead.training.module import FeatureCache, TrainingModule
from spechead.training.recipe import Recipe
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


def test_the_data_options_of_a_recipe_decide(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = recipe(folder, tmp_path)
    target = load_target(plain, bf16=False)
    source = str(folder / "data.jsonl")
    whole = [len(part) for part in parts(plain, target)]
    assert sum(whole) == 12
    twice = recipe(folder, tmp_path, **{"data.train": f"[{source},{source}]", "data.weights": "[1,2]"})
    assert [len(part) for part in parts(twice, target)] != whole and sum(map(len, parts(twice, target))) == 36
    assert sum(map(len, parts(recipe(folder, tmp_path, **{"data.limit": 5}), target))) == 5
    bad = tmp_path / "bad.jsonl"
    bad.write_text((folder / "data.jsonl").read_text() + "{\n")
    with pytest.raises(UserError, match=r"bad.jsonl line 13: not valid JSON: .* \(option data.strict\)"):
        load_data(recipe(folder, tmp_path, **{"data.train": bad, "data.strict": True}), target, FIRST)
    capsys.readouterr()
    load_data(recipe(folder, tmp_path, **{"data.train": bad}), target, FIRST)
    assert f"data: 1 of 13 conversations dropped, not valid JSON: {bad} line 13\n" in capsys.readouterr().out


def parts(settings: Recipe, target: Target) -> list[Sequence[Sample]]:
    data = load_data(settings, target, SECOND)
    return [data.training, data.validation]


def test_a_second_start_and_a_prepared_folder_give_the_same_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = recipe(folder, tmp_path, **{"data.max_length": 40})
    target = load_target(settings, bf16=False)
    first = digest(chain(*parts(settings, target)))
    prepare(preparation_of(settings.data, target, 0), tmp_path / "set")
    monkeypatch.setattr(module, "write", lambda *_: pytest.fail("prepared again"))
    assert digest(chain(*parts(settings, target))) == first
    settings.data.train = str(tmp_path / "set")
    assert digest(chain(*parts(settings, target))) == first
    dated = recipe(folder, tmp_path, **{"data.train": tmp_path / "set", "target.template_kwargs": "{a: 1}"})
    with pytest.raises(UserError, match=r"set: was prepared with template_kwargs \{\}, here it is \{'a': 1\}"):
        load_data(dated, load_target(dated, bf16=False), FIRST)


def test_the_module_of_a_recipe(folder: Path, tmp_path: Path) -> None:
    plain = recipe(folder, tmp_path, "medusa", **{"head.tree": "chain:2"})
    target = load_target(plain, bf16=False)
    assert str(bare_head(plain, target).tree) == "chain:2"
    samples = load_data(plain, target, FIRST).training
    alone = make_module(plain, target, samples, FeatureCache(0), 8)
    assert type(alone) is TrainingModule and alone.adapter is None and target.packed
    both = recipe(folder, tmp_path, "medusa", **{"adapter.peft": "{r: 2, target_modules: [q_proj]}"})
    target = load_target(both, bf16=False)
    joint = make_module(both, target, samples, FeatureCache(0), 8)
    assert isinstance(joint, JointModule) and joint.alone == 4 and not target.packed
    for name, tensor in alone.head.state_dict().items():
        assert tensor.shape == joint.head.state_dict()[name].shape


def test_precision_of_the_arithmetic() -> None:
    cpu = torch.device("cpu")
    assert computes_bf16("bf16", cpu) and not computes_bf16("float32", cpu)
