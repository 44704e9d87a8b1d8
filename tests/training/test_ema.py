"""Running averages of weights: exact values, exchange, saving with the optimizer's state, and training with them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spechead.training.checkpoints import list_checkpoints, read_weights
from spechead.training.distributed import start
from spechead.training.ema import AVERAGE, COUNT, averages, keep_average
from spechead.training.log import read_log
from spechead.training.module import FeatureCache
from spechead.training.train import set_up, train, validate
from tests.helpers.training import recipe, weights


def moved_to(values: list[float], decay: float) -> tuple[nn.Parameter, torch.optim.SGD]:
    """A weight that went through `values`, one a step, while its average was kept.

    The optimizer has momentum so that it keeps a state, which is forgotten so that each step leads where it should.
    """
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    keep_average(optimizer, decay)
    for value in values:
        optimizer.state[weight].pop("momentum_buffer", None)
        weight.grad = weight.detach() - value
        optimizer.step()
    return weight, optimizer


def average_of(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.state[weight][AVERAGE])


def test_the_average_by_hand() -> None:
    assert average_of(*moved_to([4.0], 0.5)) == 4.0
    assert average_of(*moved_to([4.0, 1.0], 0.5)) == pytest.approx((0.5 * 4 + 1) / 1.5)
    assert average_of(*moved_to([4.0, 1.0, 7.0], 0.5)) == pytest.approx((0.25 * 4 + 0.5 * 1 + 7) / 1.75)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=20), st.floats(0.01, 0.999))
def test_the_average_weighs_each_step_by_its_age(values: list[float], decay: float) -> None:
    shares = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    expected = sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares)
    assert average_of(*moved_to(values, decay)) == pytest.approx(expected, abs=1e-9)


def test_weight_and_average_change_places_and_back_also_after_an_error() -> None:
    weight, optimizer = moved_to([4.0, 1.0], 0.5)
    with pytest.raises(ValueError, match="inside"), averages(optimizer):
        assert (weight.item(), average_of(weight, optimizer)) == (pytest.approx(2.0), 1.0)
        raise ValueError("inside")
    assert (weight.item(), average_of(weight, optimizer)) == (1.0, pytest.approx(2.0))


def test_without_an_average_nothing_changes_places() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    before = weight.detach().clone()
    with averages(optimizer):
        assert torch.equal(weight, before)


def test_a_weight_without_gradient_is_left_to_the_optimizer() -> None:
    used, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, late], fused=True)
    keep_average(optimizer, 0.9)
    used.grad = torch.ones(2)
    optimizer.step()
    assert AVERAGE in optimizer.state[used] and AVERAGE not in optimizer.state[late]
    late.grad = torch.ones(2)
    optimizer.step()  # the optimizer would stumble over a state that it did not begin
    assert torch.equal(optimizer.state[late][AVERAGE], late)


def test_steps_at_a_rate_of_zero_do_not_count() -> None:
    weight, optimizer = moved_to([4.0], 0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    weight.grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[weight][COUNT] == 1


def test_the_average_goes_on_from_a_saved_state() -> None:
    weight, optimizer = moved_to([4.0, 1.0], 0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    other = nn.Parameter(weight.detach().clone())
    later = torch.optim.SGD([other], lr=1.0, momentum=0.5)
    keep_average(later, 0.5)
    later.load_state_dict(saved)
    for w, o in ((weight, optimizer), (other, later)):
        w.grad = torch.ones(1, dtype=torch.float64)
        o.step()
    assert average_of(weight, optimizer) == average_of(other, later)


@pytest.mark.parametrize("zero,precision", [(0, "float32"), (0, "bf16"), (2, "bf16")])
def test_the_head_is_the_average_of_the_masters(zero: int, precision: str, folder: Path, tmp_path: Path) -> None:
    changes = {"engine.zero_stage": zero, "engine.precision": precision, "optim.steps": 3, "log.best": "false"}
    changes |= {"log.checkpoint_every": 1, "log.keep": 3}
    train(recipe(folder, tmp_path / "plain", **changes))
    train(recipe(folder, tmp_path / "averaged", **changes | {"optim.ema": 0.5}))
    first, second, third = map(read_weights, list_checkpoints(tmp_path / "plain" / "checkpoints"))
    for name, average in weights(tmp_path / "averaged").items():
        if average.is_floating_point():
            steps = [master[f"head.{name}"].double() for master in (first, second, third)]
            expected = (0.25 * steps[0] + 0.5 * steps[1] + steps[2]) / 1.75
            assert torch.allclose(average.double(), expected, atol=1e-7), name
            assert not torch.equal(average, third[f"head.{name}"]), name
    last = list_checkpoints(tmp_path / "averaged" / "checkpoints")[-1]
    for name, tensor in weights(tmp_path / "averaged").items():
        assert torch.equal(tensor, read_weights(last)[f"head.{name}"]), name


def test_validation_uses_the_average_and_does_not_change_the_training(folder: Path, tmp_path: Path) -> None:
    changes = {"engine.precision": "bf16", "optim.lr": 0.01, "log.best": "false"}
    for name, ema in (("plain", 0.0), ("averaged", 0.9)):
        train(recipe(folder, tmp_path / name, **changes | {"optim.ema": ema}))
    plain, averaged = read_log(tmp_path / "plain"), read_log(tmp_path / "averaged")
    assert [row["loss"] for row in plain] == [row["loss"] for row in averaged]
    assert plain[7]["validation/loss"] != averaged[7]["validation/loss"]
    run = set_up(recipe(folder, tmp_path / "fresh", **changes), start(torch.device("cpu")), FeatureCache(0))
    run.module.head.load_state_dict(weights(tmp_path / "averaged"))
    assert validate(run, 8)["loss"] == averaged[7]["validation/loss"]
