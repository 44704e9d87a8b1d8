"""Fixtures of the heads' tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import LlamaConfig

from spechead.heads import Head
from tests.helpers import targets
from tests.helpers.heads import SCALED, VARIANTS, make_head
from tests.helpers.targets import BASE, make_target


@pytest.fixture
def make_variant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Head]:
    """The head of a variant, on a target of its own."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    monkeypatch.setitem(
        targets.FAMILIES, SCALED, lambda: LlamaConfig(**BASE, rope_parameters={**scaling, "rope_theta": 1000.0})
    )

    def make(name: str) -> Head:
        kind, family, options = VARIANTS[name]
        return make_head(kind, make_target(family), **options)

    return make
