"""Rank paths against real drafting, decoding and training."""

from __future__ import annotations

import pytest
import torch

from spechead.data.dataset import Sample, collate
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import Dynamic, Static, chain
from spechead.evaluation.rank_paths import OUTSIDE, accepted_by_own_tree, answer_spans, rank_paths
from spechead.evaluation.tree_search import accepted, tokens_per_pass
from spechead.heads import HEADS
from spechead.target.model import Target
from tests.helpers.heads import make_head, sample, step, trained

TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.mark.parametrize("kind", HEADS)
def test_rank_paths_predict_what_real_drafting_has_accepted(kind: str, target: Target) -> None:
    texts = [sample(target, 24, seed) for seed in (3, 4)]
    head = trained(kind, target, texts)
    answers = rank_paths(head, texts, 3)
    assert [len(answer) for answer in answers] == [23, 23]
    for plan in (chain(3), TREE):
        head.tree = plan
        predicted = [[accepted(set(plan.choices), path) for path in answer] for answer in answers]
        assert predicted == accepted_by_own_tree(head, texts), "position by position"
        runs = [
            generate(target, text.ids[:8].tolist(), head, speculation=Speculation(plan), max_new_tokens=24).stats
            for text in texts
        ]
        assert tokens_per_pass(predicted) == sum(run.tokens for run in runs) / sum(run.passes for run in runs)
        assert tokens_per_pass(predicted) > 1.05
    head.tree = Dynamic(nodes=9, depth=3, topk=4)
    runs = [generate(target, text.ids[:8].tolist(), head, max_new_tokens=24).stats for text in texts]
    now = accepted_by_own_tree(head, texts)
    assert tokens_per_pass(now) == sum(run.tokens for run in runs) / sum(run.passes for run in runs)


@pytest.mark.parametrize("kind", HEADS)
def test_what_training_counts_as_right_is_what_drafting_ranks_first(kind: str, target: Target) -> None:
    text = sample(target, 24)
    head = trained(kind, target, [text])
    hits = step(head, collate([text], 64)).hits
    [answer, _] = rank_paths(head, [text, text], head.scored_depth)
    right = 0
    for row, path in enumerate(answer, start=7):  # the root of the first pass is token 8, the answer's first
        for depth, rank in enumerate(path):
            assert (rank == 0) == bool(hits.correct[depth, 0, row]), (row, depth)
            right += rank == 0
    assert 10 < right < sum(map(len, answer))


def test_a_token_outside_the_draft_vocabulary_ends_the_path(target: Target) -> None:
    head = make_head("medusa", target)
    ids = torch.tensor([4, 6, 8, 10, 7, 12, 14])  # only even tokens can be drafted
    [answer, _] = rank_paths(head, [Sample(ids, torch.arange(7) >= 2, 0)] * 2, 3)
    assert [[rank == OUTSIDE for rank in path] for path in answer] == [
        [False, True],
        [True],
        [False, False],
        [False],
    ]


def test_answers_of_two_turns_are_two(target: Target) -> None:
    text = Sample(torch.arange(5, 15), torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=torch.bool), 0)
    assert answer_spans(text) == [(1, 4), (6, 8), (9, 10)]
    head = make_head("eagle3", target, draft_vocab_size=0)
    answers = rank_paths(head, [text], 3)
    assert [list(map(len, answer)) for answer in answers] == [[2, 1], [1]], "one token alone begins no pass"
