"""What eval and generate ask alike: the template's keywords come from the head, and a difference is told."""

from pathlib import Path

import pytest

from spechead.decoding import DecodingOptions
from spechead.errors import UserError
from spechead.files import write_json


@pytest.fixture
def head(tmp_path: Path) -> str:
    target = {"name": "some", "fingerprint": "0"}
    config = {"format": 1, "kind": "medusa", "tree": "chain:2", "target": target, "config": {}}
    write_json(tmp_path / "config.json", config | {"meta": {"template_kwargs": {"enable_thinking": False}}})
    return str(tmp_path)


def test_the_heads_keywords_are_taken_silently(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert DecodingOptions(head=head).template() == {"enable_thinking": False}
    assert DecodingOptions(target="some", template_kwargs={"a": 1}).template() == {"a": 1}
    assert capsys.readouterr().err == ""


def test_other_keywords_are_told(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert DecodingOptions(head=head, template_kwargs={"enable_thinking": True}).template() == {"enable_thinking": True}
    told = capsys.readouterr().err
    assert told.startswith("warning: ") and '{"enable_thinking": false}' in told and '{"enable_thinking": true}' in told


def test_a_target_or_a_head_is_needed() -> None:
    with pytest.raises(UserError, match="--target, or --head"):
        DecodingOptions()
