"""Targets by name: what cannot be loaded, devices, dtypes, fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from spechead.target import loading
from spechead.target.loading import choose_device, dtype_name, fingerprint, load_limits, load_tokenizer
from spechead.target.model import Target
from tests.helpers.targets import make_target


@pytest.mark.parametrize("name", ["no/such-target", "nowhere"])
def test_names_that_cannot_be_loaded(name: str) -> None:
    with pytest.raises(UserError, match=f"target '{name}' cannot be loaded"):
        load_tokenizer(name)
    with pytest.raises(UserError, match=f"target '{name}' cannot be loaded"):
        Target.load(name)


def test_devices_and_dtypes_are_checked(tmp_path: Path) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for device in ("gpu", "cuda:x"):
        with pytest.raises(UserError, match=device):
            choose_device(device)
    with pytest.raises(UserError, match="option dtype: 'int8'"):
        Target.load(str(tmp_path), dtype="int8")


def test_an_accelerator_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="option device: torch finds no accelerator for 'cuda:1'"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda", 3) and choose_device("cuda:1") == torch.device("cuda", 1)


def test_a_fingerprint_changes_with_any_weight() -> None:
    model = make_target().model
    before = fingerprint(model)
    model.get_output_embeddings().weight.data[0, 0] += 1
    assert fingerprint(model) != before and len(before) == 64


def test_four_bits_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="option target.four_bits: needs the package bitsandbytes"):
        loading.load_in_four_bits("x", torch.bfloat16, torch.device("cpu"), False)


def test_dtypes_have_their_short_names() -> None:
    assert [dtype_name(dtype) for dtype in (torch.float32, torch.bfloat16)] == ["float32", "bfloat16"]


@pytest.mark.parametrize("family", ["llama", "llama-tied-one-kv-head", "gpt2"])
def test_weights_that_the_files_lack_are_not_left_at_random_values(family: str, tmp_path: Path) -> None:
    target = make_target(family)
    state = target.model.state_dict()
    name = next(name for name in state if "mlp" in name)
    target.tokenizer.save_pretrained(tmp_path)
    target.model.save_pretrained(tmp_path)
    Target.load(str(tmp_path), device="cpu", pack=False)
    target.model.save_pretrained(tmp_path, state_dict={key: value for key, value in state.items() if key != name})
    with pytest.raises(UserError, match="its files lack 1 weights"):
        Target.load(str(tmp_path), device="cpu", pack=False)


def test_the_limits_of_a_target_are_read_without_its_weights(tmp_path: Path) -> None:
    make_target().model.config.save_pretrained(tmp_path)
    assert load_limits(str(tmp_path)) == (97, 256)
    with pytest.raises(UserError, match="target '.*absent' cannot be loaded"):
        load_limits(str(tmp_path / "absent"))
