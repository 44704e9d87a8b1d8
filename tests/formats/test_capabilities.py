"""What a format does not support is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from spechead.errors import UserError
from spechead.formats.export import write_export
from spechead.formats.registry import FORMATS
from tests.helpers.exporting import HEADS_TO_EXPORT, SUPPORTED, export_info, make_head, tiny


@pytest.mark.parametrize("form", FORMATS)
def test_an_option_that_the_format_does_not_know_is_refused(form: str, tmp_path: Path) -> None:
    from dataclasses import dataclass

    target = tiny("llama")
    name = next(name for name in HEADS_TO_EXPORT if name in SUPPORTED[form])
    head = make_head(name, target)

    @dataclass
    class Newer(type(head).Config):  # type: ignore[misc]
        depth_bias: float = 0.0

    head.config = Newer(**vars(head.config))
    write_export(head, form, tmp_path / "unused", export_info(target, tmp_path))
    head.config.depth_bias = 0.5
    with pytest.raises(
        UserError,
        match=r"depth_bias: 0\.5 cannot be exported: the export to .* does not know this",
    ):
        write_export(head, form, tmp_path / "used", export_info(target, tmp_path))
    assert not (tmp_path / "used").exists()


def test_a_target_with_an_adapter_is_refused(tmp_path: Path) -> None:
    target = tiny("llama")
    head = make_head("eagle3", target)
    target.adapter = "org/lora"
    try:
        with pytest.raises(UserError, match="adapter 'org/lora'.*export with --merged-target FOLDER"):
            write_export(head, "vllm", tmp_path / "out", export_info(target, tmp_path))
    finally:
        target.adapter = ""
