"""Prompt lookup: hand-made texts, and the index against a search of the whole text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import chain
from spechead.drafters.prompt_lookup import LookupState, PromptLookup
from spechead.errors import UserError
from tests.helpers.drafters import NOTHING, TREE


def drafts(text: list[int], depth: int = 4, ngram: int = 3, match: str = "first") -> list[int]:
    drafter = PromptLookup(ngram, match)
    tree = drafter.propose(drafter.new_state(torch.tensor(text[:1])), torch.tensor(text[1:]), NOTHING, chain(depth))
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert tree.tokens[0] == text[-1]
    assert tree.drawn_from is None
    return tree.tokens[1:].tolist()


@pytest.mark.parametrize(
    "text,first,latest",
    [
        ([1, 2, 3, 9, 8, 7, 6, 1, 2, 3], [9, 8, 7, 6], [9, 8, 7, 6]),  # as deep as the plan
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]),  # and up to the end of the text
        ([5, 3, 9, 2, 3, 8, 7, 3], [9, 2, 3, 8], [8, 7, 3]),  # one token is enough; the first place, or the latest
        ([7, 3, 4, 2, 3, 8, 2, 3], [8, 2, 3], [8, 2, 3]),  # two tokens are better than one
        ([4, 4, 4, 4], [4], [4]),  # an n-gram may overlap itself: 4 4 4 stood at the beginning
        ([2, 4, 4], [4], [4]),  # the last token itself is no match, the one before it is
        ([1, 2, 3], [], []),  # nothing is found: the root alone
        ([6, 6], [6], [6]),
    ],
)
def test_hand_made_texts(text: list[int], first: list[int], latest: list[int]) -> None:
    assert drafts(text) == first
    assert drafts(text, match="latest") == latest


def test_shorter_grams_are_asked_for() -> None:
    text = [7, 3, 4, 2, 3, 8, 2, 3]
    assert drafts(text, ngram=1) == [4, 2, 3, 8]
    assert drafts(text, ngram=2) == [8, 2, 3]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 4), st.integers(1, 6), st.data())
def test_the_index_finds_what_a_search_finds(text: list[int], ngram: int, depth: int, data: st.DataObject) -> None:
    def search(latest: bool) -> list[int]:
        for n in range(min(ngram, len(text) - 1), 0, -1):
            places = [i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
            if places:
                place = places[-1 if latest else 0]
                return text[place : place + depth]
        return []

    for match in ("first", "latest"):
        assert drafts(text, depth, ngram, match) == search(match == "latest")


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.lists(st.integers(0, 3), max_size=9))
def test_rewinding_forgets(text: list[int], guesses: list[int]) -> None:
    drafter = PromptLookup()
    read, straight = LookupState(text[0]), LookupState(text[0])
    drafter.propose(straight, torch.tensor(text[1:]), NOTHING, chain(1))
    drafter.propose(read, torch.tensor(text[1:] + guesses), NOTHING, chain(1))
    drafter.rewind(read, len(text))
    assert read == straight
    drafter.rewind(read, 0)
    assert read == LookupState(text[0])


def test_a_tree_is_used_by_its_depth_and_the_end_of_sequence_is_a_token() -> None:
    drafter = PromptLookup()
    tree = drafter.propose(drafter.new_state(torch.tensor([5])), torch.tensor([2, 6, 7, 5]), NOTHING, TREE)
    assert tree.tokens.tolist() == [5, 2, 6, 7]  # 2 is the end of sequence; the loop cuts there, not the drafter


def test_a_floor_changes_nothing() -> None:
    drafter, text = PromptLookup(), torch.tensor([5, 2, 6, 7, 5])
    tree = drafter.propose(drafter.new_state(text[:1]), text[1:], NOTHING, chain(3, floor=0.9))
    assert tree.tokens.tolist() == [5, 2, 6, 7]


def test_copies_are_not_sampled() -> None:
    drafter = PromptLookup()
    with pytest.raises(UserError, match="cannot sample"):
        drafter.propose(
            drafter.new_state(torch.tensor([5])), torch.tensor([2]), NOTHING, chain(1), Drawing(1.0, SeededSource(0))
        )
