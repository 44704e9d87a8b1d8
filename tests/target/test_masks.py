"""Masks by hand: which keys each new token sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.target.masks import attention_masks, refuse_unknown_layers

FULL, SLIDING = "full_attention", "sliding_attention"


def masks(new: int, past: int, *, lengths: list[int] | None = None, batch: int = 1, **more: Any) -> Any:
    config = SimpleNamespace(sliding_window=more.pop("window", None), layer_types=more.pop("types", None))
    first = torch.tensor(lengths)[:, None] if lengths else past
    positions = (torch.arange(new) + first).expand(batch, new)
    settings: dict[str, Any] = {"optional": True, "by_type": False, "visible": None} | more
    return attention_masks(config, torch.float32, past, lengths, positions, **settings)


def seen(mask: Tensor) -> list[list[list[int]]]:
    """The visible keys of each new token, row by row."""
    return [[query.nonzero()[:, 0].tolist() for query in row[0] == 0] for row in mask]


def test_a_tree_sees_the_cache_and_its_ancestors() -> None:
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    assert seen(masks(3, 2, visible=visible)) == [[[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]]


def test_rows_see_their_own_length_of_the_cache() -> None:
    assert seen(masks(2, 3, lengths=[3, 1], batch=2)) == [[[0, 1, 2, 3], [0, 1, 2, 3, 4]], [[0, 3], [0, 3, 4]]]


def test_a_window_counts_positions_and_not_columns() -> None:
    mask = masks(2, 4, lengths=[4, 2], batch=2, window=3)
    assert seen(mask) == [[[2, 3, 4], [3, 4, 5]], [[0, 1, 4], [1, 4, 5]]]


@pytest.mark.parametrize(("new", "past"), [(1, 5), (4, 0)])
def test_no_mask_where_the_attention_function_needs_none(new: int, past: int) -> None:
    assert masks(new, past) is masks(new, past, window=9) is None
    assert masks(new, past, types=[FULL, SLIDING], window=9, by_type=True) == {FULL: None, SLIDING: None}
    assert masks(new, past, optional=False) is not None and masks(new, past, window=2) is not None


def test_a_mask_for_each_layer_type() -> None:
    found = masks(1, 4, types=[FULL, SLIDING], window=2, by_type=True)
    assert found[FULL] is None and seen(found[SLIDING]) == [[[3, 4]]]
    assert seen(masks(1, 4, types=[SLIDING], window=2)) == [[[3, 4]]]


def test_other_layers_are_refused() -> None:
    config = SimpleNamespace(model_type="mamba", layer_types=["linear_attention", FULL])
    with pytest.raises(UserError, match=r"target 'x' \(mamba\) has layers of type linear_attention"):
        refuse_unknown_layers(config, "x")
