"""Which tokens a reduced draft vocabulary contains."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spechead.data import draft_vocabulary as module
from spechead.data.dataset import Sample
from spechead.data.draft_vocabulary import count_tokens, draft_vocabulary
from spechead.errors import UserError


def test_draft_vocabulary_by_hand() -> None:
    ids = torch.tensor([9, 9, 9, 5, 5, 7, 7, 3, 8, 8, 8, 8])
    supervised = torch.tensor([True] * 8 + [False] * 4)  # 8 is frequent, but the user's
    sample = Sample(ids, supervised, 0)
    assert draft_vocabulary([sample], 1, 16).tolist() == [9]
    assert draft_vocabulary([sample], 2, 16).tolist() == [5, 9]  # as frequent as 7, but smaller
    assert draft_vocabulary([sample], 6, 16).tolist() == [0, 1, 3, 5, 7, 9]
    assert draft_vocabulary([sample], 16, 16).tolist() == list(range(16))
    with pytest.raises(UserError, match="draft_vocab_size: must be above 0 and at most the target's 16, got 17"):
        draft_vocabulary([sample], 17, 16)


@given(st.lists(st.integers(0, 19), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 99))
def test_draft_vocabulary_contains_the_most_frequent(tokens: list[int], size: int, cut: int) -> None:
    supervised = torch.arange(len(tokens)) >= cut % len(tokens)
    vocabulary = draft_vocabulary([Sample(torch.tensor(tokens), supervised, 0)], size, 20)
    chosen = vocabulary.tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == size and vocabulary.dtype == torch.int64
    counted = [tokens[i] for i in range(len(tokens)) if supervised[i]]
    worst = min((counted.count(token), -token) for token in chosen)
    assert all((counted.count(t), -t) < worst for t in range(20) if t not in chosen)


@pytest.mark.parametrize("block", [1, 3, 100])
def test_tokens_are_counted_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    samples = [Sample(torch.tensor([1, 2, 2 + i]), torch.tensor([False, True, True]), i) for i in range(4)]
    assert count_tokens(samples, 8).tolist() == [0, 0, 5, 1, 1, 1, 0, 0]
    assert count_tokens([], 3).tolist() == [0, 0, 0]
