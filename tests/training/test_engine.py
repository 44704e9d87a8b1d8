"""The engine around a small module: schedules, accumulated gradients, groups with their own rates, saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spechead.errors import UserError
from spechead.training.distributed import start
from spechead.training.engine import Engine, Group, learning_rate_factor
from spechead.training.recipe import OptimConfig


@pytest.mark.parametrize("schedule,last", [("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_schedules_by_hand(schedule: str, last: float) -> None:
    factor = learning_rate_factor(schedule, 11, 0.2, 0.1)
    assert [factor(0), factor(1), factor(2)] == [0.5, 1.0, 1.0]
    assert factor(10) == pytest.approx(last)
    assert factor(6) == pytest.approx({"cosine": 0.55, "linear": 0.55, "constant": 1.0}[schedule])


class Product(nn.Module):
    """The sum of two weights times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.first + self.second) * x).sum()


def make_engine(second: Callable[[int], float] = lambda step: 1.0, ema: float = 0.0, **options: Any) -> Engine:
    start(torch.device("cpu"))
    module = Product()
    groups = [Group([module.first], 0.1, lambda step: 1.0), Group([module.second], 0.1, second)]
    optim = OptimConfig(betas=(0.9, 0.99), clip_norm=0.0, ema=ema)
    defaults: dict[str, Any] = {"accumulation": 1, "zero_stage": 0, "bf16": False}
    return Engine(module, groups, optim, **defaults | options)


def take_step(engine: Engine, *inputs: float) -> None:
    for x in inputs:
        engine.backward(engine(torch.full((2,), x)))
        engine.step()


def test_micro_steps_add_their_gradients() -> None:
    engine = make_engine(accumulation=2)
    take_step(engine, 3.0, 1.0)
    assert engine.grad_norm == pytest.approx((4 * 4.0**2) ** 0.5), "the gradient of each of four numbers is 3 + 1"


def test_a_group_whose_rate_starts_at_0_takes_its_first_step_as_a_first_step() -> None:
    engine = make_engine(lambda step: 0.0 if step < 3 else 1.0)
    for _ in range(3):
        take_step(engine, 1.0)
    before = engine.master_weights()
    assert torch.equal(before["second"], torch.ones(2)) and engine.lr == 0.1
    take_step(engine, 1.0)
    moved = before["second"] - engine.master_weights()["second"]
    assert (moved > 0.1).all(), "Adam with a wrong count would take a shorter step"


@pytest.mark.parametrize("zero,bf16", [(0, False), (0, True), (2, True)])
def test_what_is_saved_is_restored_with_the_average(zero: int, bf16: bool, tmp_path: Path) -> None:
    engine = make_engine(ema=0.5, zero_stage=zero, bf16=bf16)
    for x in (1.0, 2.0):
        take_step(engine, x)
    saved, weight = engine.master_weights(), engine.module.get_parameter("first")
    own = weight.detach().clone()
    with engine.averaged():
        assert torch.equal(weight, saved["first"].to(own.dtype))
    assert torch.equal(weight, own) and not torch.equal(own, saved["first"].to(own.dtype))
    engine.save(tmp_path / "one", {"step": 2})
    drawn = torch.rand(3)
    take_step(engine, 3.0)
    assert engine.load(tmp_path / "one")["step"] == 2
    assert torch.equal(torch.rand(3), drawn), "the random state is restored, too"
    for name, tensor in engine.master_weights().items():
        assert torch.equal(tensor, saved[name])


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="cannot read the checkpoint .*none: it is damaged"):
        make_engine().load(tmp_path / "none")
