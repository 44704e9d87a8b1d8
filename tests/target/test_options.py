"""Options of commands that load a target."""

from __future__ import annotations

from typing import Any

import pytest

from spechead.errors import UserError
from spechead.target import options as module
from spechead.target.options import TargetOptions


def test_auto_is_bfloat16_where_that_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, precision in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(module, "native_bfloat16", lambda device, native=native: native)
        assert TargetOptions(dtype="auto", device="cpu").precision == precision
        assert TargetOptions(dtype="float16", device="cpu").precision == "float16"


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(UserError, match="option dtype: 'int8' is not one of auto, float32, bfloat16, float16"):
        TargetOptions(dtype="int8")


def test_what_cannot_be_recorded_is_refused() -> None:
    for value in (float("nan"), float("inf"), {1}):
        with pytest.raises(UserError, match="option template_kwargs: must be values that JSON has"):
            TargetOptions(template_kwargs={"deep": [value]})
    with pytest.raises(UserError, match="option chat_template: is not valid UTF-8"):
        TargetOptions(chat_template="{{ 1 }}\udce9")


def test_the_options_reach_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(module.Target, "load", lambda name, **more: calls.append((name, more)))
    options = TargetOptions(target="tiny", adapter="lora", dtype="bfloat16", device="cpu", trust_remote_code=True)
    options.load()
    options.load("draft", "its own", pack=False)
    same: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "trust_remote_code": True}
    same |= {"chat_template": "", "template_kwargs": {}, "template_date": ""}
    assert calls == [
        ("tiny", {"adapter": "lora", "pack": True, **same}),
        ("draft", {"adapter": "its own", "pack": False, **same}),
    ]
