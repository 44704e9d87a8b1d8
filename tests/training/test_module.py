"""The module that is trained: packed rows, and the cache of the target's outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spechead.data.dataset import collate
from spechead.target.model import Target, TargetOutput
from spechead.training.module import FeatureCache, TrainingModule
from spechead.training.recipe import OptimConfig
from tests.helpers.heads import make_head, sample


def test_the_loss_of_a_batch_is_the_sum_over_its_conversations(target: Target) -> None:
    samples = [sample(target, length, seed) for length, seed in ((6, 1), (9, 2))]
    module = TrainingModule(make_head("medusa", target), FeatureCache(0))
    together = module(collate(samples, 64), 1)
    apart = [module(collate([one], 64), 1) for one in samples]
    assert float(together.loss.detach()) == pytest.approx(sum(float(one.loss.detach()) for one in apart), rel=1e-5)
    hits = sum(int(one.hits.correct.sum()) for one in apart)
    assert int(together.hits.correct.sum()) == hits and together.parts == {}


def test_a_cached_output_saves_the_targets_forward_pass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate([sample(target, 6)], 64)
    passes, forward = 0, target.forward

    def counted(*args: Any, **options: Any) -> TargetOutput:
        nonlocal passes
        passes += 1
        return forward(*args, **options)

    monkeypatch.setattr(target, "forward", counted)
    for cache, expected in ((FeatureCache(1), 1), (FeatureCache(0), 2)):
        module, passes = TrainingModule(make_head("eagle3", target), cache), 0
        first, second = (module(batch, step).loss.detach() for step in (1, 2))
        assert passes == expected and torch.equal(first, second)


def test_a_head_is_one_group_with_the_recipes_schedule(target: Target) -> None:
    head = make_head("medusa", target)
    [group] = TrainingModule(head, FeatureCache(0)).groups(OptimConfig(lr=0.5, warmup_share=0.2), 10)
    assert group.lr == 0.5 and (group.factor(0), group.factor(1)) == (0.5, 1.0)
    assert sum(p.numel() for p in group.parameters) == sum(p.numel() for p in head.parameters())
    assert torch.is_tensor(group.parameters[0])


def test_samples_of_one_conversation_have_their_own_outputs(target: Target) -> None:
    one, other = sample(target, 6, 1), sample(target, 6, 2)
    assert one.row == other.row
    module = TrainingModule(make_head("eagle3", target), FeatureCache(1))
    first, second = (module.frozen_output(collate([text], 64)).hidden for text in (one, other))
    assert not torch.equal(first, second)
    assert torch.equal(module.frozen_output(collate([one], 64)).hidden, first)
