"""What eval and generate ask alike: the template's keywords come from the head, and a difference is told."""

from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from spechead.evaluation import options as decoding
from spechead.evaluation.options import DecodingOptions
from spechead.files import write_json
from spechead.heads.files import HeadInfo
from spechead.target.loading import native_bfloat16
from spechead.target.model import Target


@pytest.fixture
def head(tmp_path: Path) -> str:
    target = {"name": "some", "fingerprint": "0"}
    config = {"format": 1, "kind": "medusa", "tree": "chain:2", "target": target, "config": {}}
    write_json(tmp_path / "config.json", config | {"meta": {"template_kwargs": {"enable_thinking": False}}})
    return str(tmp_path)


def test_the_heads_keywords_are_taken_silently(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = {"chat_template": "", "template_date": ""}
    assert DecodingOptions(head=head).template() == {"template_kwargs": {"enable_thinking": False}} | rest
    assert DecodingOptions(target="some", template_kwargs={"a": 1}).template() == {"template_kwargs": {"a": 1}} | rest
    assert capsys.readouterr().err == ""


def test_other_keywords_are_told(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = DecodingOptions(head=head, template_kwargs={"enable_thinking": True})
    assert options.template()["template_kwargs"] == {"enable_thinking": True}
    told = capsys.readouterr().err
    assert told.startswith("warning: ") and '{"enable_thinking": false}' in told and '{"enable_thinking": true}' in told


def test_the_template_and_the_date_of_the_head_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = {"name": "some", "fingerprint": "0"}
    meta = {"template_kwargs": {}, "chat_template": "{{ a }}", "template_date": "2026-01-02"}
    config = {"format": 1, "kind": "medusa", "tree": "chain:2", "target": target, "config": {}, "meta": meta}
    write_json(tmp_path / "config.json", config)
    assert DecodingOptions(head=str(tmp_path)).template() == meta
    assert capsys.readouterr().err == ""
    assert DecodingOptions(head=str(tmp_path), template_date="2026-02-03").template()["template_date"] == "2026-02-03"
    DecodingOptions(head=str(tmp_path), chat_template="{{ b }}").template()
    assert "was trained with another chat template" in capsys.readouterr().err
    with pytest.raises(UserError, match="option template_date: must be a date as YYYY-MM-DD, got 'tomorrow'"):
        DecodingOptions(target="some", template_date="tomorrow")


def test_a_dtype_of_drafts_is_known_or_refused(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    with pytest.raises(UserError, match="option draft_dtype: 'int4' is not one of auto, float32, bfloat16, float16"):
        DecodingOptions(target="some", draft_dtype="int4")
    given: list[object] = []
    monkeypatch.setattr(decoding, "load_head", lambda folder, target, *, force, dtype: given.append(dtype))
    monkeypatch.setattr(decoding, "read_info", HeadInfo)
    for name in ("float32", "bfloat16", "auto"):
        DecodingOptions(head="h", draft_dtype=name).load_head(target)
    assert given[:2] == [torch.float32, torch.bfloat16]
    assert given[2] == (torch.bfloat16 if native_bfloat16(target.device) else torch.float32)


def test_a_draft_model_gets_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    given: list[object] = []
    monkeypatch.setattr(decoding, "load_drafter", lambda name, target, **more: given.append((name, more)))
    options = DecodingOptions(target="some", draft_dtype="float16", trust_remote_code=True)
    options.load_drafter("draft_model:x", target)
    assert given == [("draft_model:x", {"dtype": "float16", "trust_remote_code": True})]


def test_a_target_or_a_head_is_needed() -> None:
    with pytest.raises(UserError, match="--target, or --head"):
        DecodingOptions()
