"""Every head that a format supports comes back bit for bit, and every other is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spechead.errors import UserError
from spechead.formats.check import check_folder
from spechead.formats.export import write_export
from spechead.formats.registry import FORMATS, detect
from tests.helpers.exporting import FAMILIES, HEADS_TO_EXPORT, SUPPORTED, export_info, make_head, tiny

STORED_ROWS_ALONE = {"sglang", "eagle", "trtllm"}  # embed with them, whatever the files hold


REFUSED = r"option head\.options|heads in this format|EAGLE supports only|scales its embeddings"


FEW = ("eagle3", "eagle3-all-tokens", "eagle-layers", "medusa", "medusa-shared")  # on families but llama


def supports(form: str, family: str, name: str) -> bool:
    if name not in SUPPORTED[form]:
        return False
    if family == "gemma3" and form in STORED_ROWS_ALONE:
        return name.startswith("medusa")
    return not (form == "eagle" and name in ("eagle", "eagle-layers") and family == "qwen3-wide-heads")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMATS)
def test_heads_come_back_bit_for_bit_or_are_refused(form: str, family: str, tmp_path: Path) -> None:
    target = tiny(family)
    for name in HEADS_TO_EXPORT if family == "llama" else FEW:
        head, out = make_head(name, target), tmp_path / name
        if not supports(form, family, name):
            with pytest.raises(UserError, match=REFUSED):
                write_export(head, form, out, export_info(target, tmp_path))
            assert not out.exists()
            continue
        write_export(head, form, out, export_info(target, tmp_path))
        assert name in FORMATS[form].serve_command(head, name, export_info(target, tmp_path))
        assert detect(out) == form
        back = FORMATS[form].load(out, target).head(target)
        expected, imported = head.state_dict(), back.state_dict()
        assert expected.keys() == imported.keys()
        assert all(torch.equal(expected[key], imported[key]) for key in expected)
        assert type(back) is type(head)
        lines = list(check_folder(out, target, head))
        assert [str(line) for line in lines if not line.ok] == []
        assert {"files", "manifest", "target", "contents", "weights", "forward"} <= {line.name for line in lines}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_half_precision_is_the_heads_rounded(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = tiny("llama")
    name = next(name for name in HEADS_TO_EXPORT if name in SUPPORTED[form])
    head = make_head(name, target)
    write_export(head, form, tmp_path / "out", export_info(target, tmp_path, dtype))
    back = FORMATS[form].load(tmp_path / "out", target)
    for key, tensor in back.tensors.items():
        assert torch.equal(tensor, head.state_dict()[key].to(tensor.dtype))
        assert tensor.dtype in (dtype, torch.int64, torch.bool) or (form == "llama.cpp" and tensor.dim() == 1)
    assert all(line.ok for line in check_folder(tmp_path / "out", target, head))
