"""Targets by name: what cannot be loaded, devices, dtypes, fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from spechead.errors import UserError
from spechead.target import loading
from spechead.target.loading import choose_device, dtype_name, fingerprint, load_limits, load_tokenizer
from spechead.target.model import Target
from spechead.target.options import TemplateOptions
from tests.helpers.targets import CHATML, make_target, make_toy_tokenizer


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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path


def test_an_adapters_own_tokenizer_and_template_are_used(saved: Path) -> None:
    name, adapter = str(saved / "target"), saved / "lora"
    adapter.mkdir()
    assert load_tokenizer(name, str(adapter)).chat_template == CHATML
    own = make_toy_tokenizer()
    own.chat_template = "{{ 'own' }}" + CHATML
    own.add_tokens(["<new>"])
    own.save_pretrained(adapter)
    found = load_tokenizer(name, str(adapter))
    assert found.chat_template.startswith("{{ 'own' }}") and "<new>" in found.get_vocab()
    chat = TemplateOptions(target=name, adapter=str(adapter)).load_chat()
    assert chat.prompt_text([{"role": "user", "content": "Hi"}]).startswith("own<|im_start|>")
    own.chat_template = None
    own.save_pretrained(adapter)
    (adapter / "chat_template.jinja").unlink(missing_ok=True)
    assert load_tokenizer(name, str(adapter)).chat_template == CHATML


def test_an_adapter_whose_tokens_have_other_ids_is_refused(saved: Path) -> None:
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_token="b"
    )
    other.save_pretrained(saved / "lora")
    with pytest.raises(UserError, match="option adapter: the tokenizer in '.*lora' has other ids than that of"):
        load_tokenizer(str(saved / "target"), str(saved / "lora"))


def test_the_end_of_a_turn_joins_the_ends_of_the_target(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template ends turns with a token that the config does not name."""
    name = str(saved / "target")
    assert Target.load(name).eos_ids == {2}
    assert "warning" not in capsys.readouterr().err
    target = Target.load(name, chat_template=CHATML.replace("<|im_end|>", "<pad>"))
    assert target.eos_ids == {0, 2}
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: target '{name}': its chat template ends an answer with '<pad>' (0), which the")
    target = Target.load(name, template_kwargs={"a": 1}, template_date="2026-01-02")
    assert (target.chat.keywords, target.chat.date) == ({"a": 1}, "2026-01-02")


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
