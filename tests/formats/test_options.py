"""The target of export, import and check."""

from __future__ import annotations

from pathlib import Path

import torch

from spechead.formats.options import ExchangeOptions


def test_the_target_is_loaded_as_it_is_stored(tiny_run: Path) -> None:
    folder = str(tiny_run / "target")
    for target in (ExchangeOptions(target=folder).load_target(), ExchangeOptions().load_target(folder)):
        assert (target.dtype, target.packed, target.device.type) == (torch.float32, False, "cpu")
        assert target.name == folder
