"""Saving and loading heads of every kind, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.data.dataset import collate
from spechead.decoding.generate import Speculation, generate
from spechead.errors import UserError
from spechead.heads import HEADS, Head
from spechead.heads.files import load_head, read_info, save_head, save_tree
from spechead.target.model import Target
from tests.helpers.heads import PLANS, VARIANTS, make_head, sample, step
from tests.helpers.targets import make_target


@pytest.mark.parametrize("kind", HEADS)
def test_saved_heads_come_back(kind: str, target: Target, tmp_path: Path) -> None:
    head = make_head(kind, target)
    head.tree = PLANS[2]
    save_head(head, tmp_path / "head", {"note": "x"})
    again = load_head(tmp_path / "head", target, dtype=torch.float32)
    assert str(again.tree) == str(PLANS[2]) and read_info(tmp_path / "head").target == target.name
    check_same(head, again)
    held = {p.data_ptr() for p in target.model.parameters()}
    assert not held & {t.data_ptr() for t in head.state_dict().values()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_variants_come_back(variant: str, make_variant: Callable[[str], Head], tmp_path: Path) -> None:
    head = make_variant(variant)
    save_head(head, tmp_path / "head", {})
    again = load_head(tmp_path / "head", head.target, dtype=torch.float32)
    assert again.config == head.config
    check_same(head, again)
    batch = collate([sample(head.target)], 64)
    assert float(step(again, batch).loss) == float(step(head.eval(), batch).loss.detach())


def check_same(head: Head, again: Head) -> None:
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_before_an_option_keep_their_meaning(kind: str, tmp_path: Path) -> None:
    """What a file does not name has its default; positions stay without scaling, on a scaled target too."""
    head = make_head(kind, make_target())
    save_head(head, tmp_path / "head", {})
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    for option in ("n_layers", "norm_output", "fc_norm", "step_weights", "rope_scaling", "loss"):
        if config["config"].get(option) == getattr(HEADS[kind].Config(), option, None):
            config["config"].pop(option, None)
    path.write_text(json.dumps(config))
    assert load_head(tmp_path / "head", head.target).config == head.config
    config["config"]["colour"] = "red"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"a {kind} head has no option colour"):
        load_head(tmp_path / "head", head.target)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_drafts_in_bfloat16_changes_no_text(kind: str, target: Target, tmp_path: Path) -> None:
    save_head(make_head(kind, target), tmp_path / "head", {})
    head = load_head(tmp_path / "head", target, dtype=torch.bfloat16)
    assert head.dtype == torch.bfloat16 != target.dtype
    prompt = sample(target, 2).ids.tolist()
    plain = generate(target, prompt, max_new_tokens=16).tokens
    for plan in PLANS:
        assert generate(target, prompt, head, speculation=Speculation(plan), max_new_tokens=16).tokens == plain


@pytest.mark.parametrize("kind", HEADS)
def test_damaged_heads_are_refused(kind: str, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_head(make_head(kind, target), folder, {})
    other = make_target(seed=9)
    with pytest.raises(UserError, match="was trained for target"):
        load_head(folder, other)
    load_head(folder, other, force=True)
    state = load_file(folder / "model.safetensors")
    first = next(iter(state))
    save_file({k: v for k, v in state.items() if k != first}, folder / "model.safetensors")
    with pytest.raises(UserError, match="missing tensors"):
        load_head(folder, target)
    save_file(state | {"stray": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="unexpected tensors"):
        load_head(folder, target)
    save_file(state | {first: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="wrong shape"):
        load_head(folder, target)
    weight = next(name for name, tensor in state.items() if tensor.is_floating_point())
    save_file(state | {weight: state[weight] * float("nan")}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{weight} has non-finite values"):
        load_head(folder, target)
    for change in ({"d2t": state["d2t"] + 90}, {"d2t": state["d2t"].float()}, {"t2d": ~state["t2d"]}):
        save_file(state | change, folder / "model.safetensors")
        with pytest.raises(UserError, match="no draft vocabulary of a target with 97 tokens"):
            load_head(folder, target)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="damaged or no safetensors file"):
        load_head(folder, target)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not a spechead head"):
        load_head(folder, target)
    with pytest.raises(UserError, match="no head at"):
        load_head(tmp_path / "nowhere", target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "x"}, "target is 'x'"),
        ({"target": {}}, "target has no name"),
        ({"target": {"name": "x"}}, "target has no fingerprint"),
        ({"tree": None}, "tree is None"),
        ({"tree": "nope"}, "tree: 'nope' is not a tree"),
        ({"config": []}, r"config is \[\]"),
        ({"config": {"layers": "x"}}, "option head.options.layers"),
        ({"config": {"steps": "a"}}, "option head.options.steps"),
        ({"config": {"steps": 0}}, "option head.options.steps: must be at least 1"),
        ({"meta": None}, "meta is None"),
        ({"kind": []}, r"kind is \[\]"),
    ],
)
def test_an_edited_configuration_is_one_line_that_names_the_file(
    change: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    save_head(make_head("eagle3", target), tmp_path / "head", {})
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        load_head(tmp_path / "head", target, force=True)


def test_a_head_of_no_numbers_is_not_written(target: Target, tmp_path: Path) -> None:
    head = make_head("eagle3", target)
    torch.nn.init.constant_(head.get_parameter("norm.weight"), float("inf"))
    with pytest.raises(UserError, match="is not written: norm.weight has non-finite values"):
        save_head(head, tmp_path / "head", {})
    assert not (tmp_path / "head").exists()


def test_the_info_of_a_head(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    meta = {"four_bits": True, "template_kwargs": {"a": 1}, "foreign": "3 of 9", "data": "d", "split": {"seed": 5}}
    save_head(make_head("medusa", target), folder, meta)
    info = read_info(folder)
    assert (info.kind, info.target, info.fingerprint, info.adapter) == ("medusa", target.name, target.fingerprint, "")
    assert (info.four_bits, info.template["template_kwargs"], info.foreign_data) == (True, {"a": 1}, "3 of 9")
    assert info.data == {"train": "d", "seed": 5} and info.config.n_heads == 4
    (folder / "adapter").mkdir()
    assert info.adapter == str(folder / "adapter")


def test_a_folder_without_its_adapter_is_refused(target: Target, tmp_path: Path) -> None:
    save_head(make_head("medusa", target), tmp_path, {"adapter": {"r": 4}})
    with pytest.raises(UserError, match="was trained together with an adapter, and .* is missing: copy the whole"):
        read_info(tmp_path).adapter  # noqa: B018


def test_a_new_tree_leaves_the_rest_of_the_file_as_it_was(target: Target, tmp_path: Path) -> None:
    save_head(make_head("medusa", target), tmp_path, {"note": "x"})
    before = json.loads((tmp_path / "config.json").read_text())
    save_tree(tmp_path, PLANS[1])
    after = json.loads((tmp_path / "config.json").read_text())
    assert list(after) == list(before) and after == before | {"tree": str(PLANS[1])}
