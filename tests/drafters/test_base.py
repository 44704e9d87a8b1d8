"""Which drafters draft which plans."""

from __future__ import annotations

from spechead.decoding.tree import Dynamic, Static, chain
from spechead.drafters.base import can_draft, is_chain
from spechead.drafters.parse import parse_drafter
from tests.helpers.drafters import TREE


def test_only_some_drafters_branch() -> None:
    for text, branches in (("prompt_lookup", False), ("self:0-3", True), ("draft_model:x", True)):
        assert can_draft(parse_drafter(text).kind, TREE) == branches
        assert can_draft(parse_drafter(text).kind, Dynamic(6, 3, 2)) == branches
        assert can_draft(parse_drafter(text).kind, chain(3, floor=0.1))
    assert not can_draft(parse_drafter("staged:self:0-3+prompt_lookup").kind, TREE)
    assert is_chain(Static(((0,), (0, 0)))) and not is_chain(Static(((0,), (1,)))) and not is_chain(Static(((1,),)))
