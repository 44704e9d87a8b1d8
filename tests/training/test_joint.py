"""Medusa-2: its two stages. Whole runs, with their losses and what is saved, are in target/test_adapter.py."""

from __future__ import annotations

import pytest
import torch

from spechead.data.dataset import collate
from spechead.training.joint import JointModule, head_weight
from spechead.training.module import FeatureCache
from spechead.training.recipe import AdapterConfig, OptimConfig
from tests.helpers.heads import make_head, sample
from tests.helpers.targets import make_target


def joint(config: AdapterConfig, total: int) -> JointModule:
    target = make_target()
    head = make_head("medusa", target, n_heads=2)
    return JointModule(head, FeatureCache(0), target.adapt({"r": 2, "target_modules": ["q_proj"]}), config, total)


@pytest.mark.parametrize(("share", "total", "alone"), [(0.5, 8, 4), (0.0, 8, 0), (0.9, 2, 1), (0.5, 1, 0)])
def test_the_head_is_trained_alone_first_and_never_to_the_end(share: float, total: int, alone: int) -> None:
    module = joint(AdapterConfig(start_share=share), total)
    assert module.alone == alone
    assert [module.comparable(step) for step in (alone, alone + 1)] == [False, True]


def test_the_adapter_waits_and_then_has_a_schedule_of_its_own() -> None:
    module = joint(AdapterConfig(lr=0.25), 8)
    head, adapter = module.groups(OptimConfig(lr=0.5, warmup_share=0.25, schedule="linear", min_lr_share=0), 8)
    assert (head.lr, adapter.lr) == (0.5, 0.25)
    assert [adapter.factor(step) for step in range(4)] == [0, 0, 0, 0]
    assert [adapter.factor(step) for step in (4, 7)] == [1.0, 0.0], "warm-up of one step, then down to 0 at the end"
    assert head.factor(0) == 0.5
    assert len(adapter.parameters) == len(module.adapter_parameters)


def test_the_adapter_has_a_gradient_in_the_second_stage_only() -> None:
    module = joint(AdapterConfig(head_weight=0.5, loss="text"), 4)
    batch = collate([sample(module.head.target, 6)], 64)
    for step, trained in ((2, False), (3, True)):
        output = module(batch, step)
        gradients = torch.autograd.grad(output.loss, [*module.adapter_parameters])
        assert any(bool(gradient.any()) for gradient in gradients) == trained
        assert tuple(output.parts) == (module.parts if trained else ())
    loss = 0.5 * output.parts["head_loss"] + output.parts["target_loss"]
    assert float(output.loss.detach()) == pytest.approx(float(loss), rel=1e-6)


def test_the_weight_of_the_heads_loss_by_hand() -> None:
    weights = [
        [round(head_weight(AdapterConfig(head_weight=0.5, head_schedule=schedule), done), 4) for done in (0, 0.5, 1)]
        for schedule in ("constant", "linear", "sine")
    ]
    assert weights == [[0.5, 0.5, 0.5], [0.0, 0.25, 0.5], [0.0, 0.3536, 0.5]]
