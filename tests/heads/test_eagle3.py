"""EAGLE-3: names of tensors, what each norm flag changes, several layers, step weights, what cannot be built."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spechead.data.dataset import Batch, collate
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.heads.attention import UnrolledAttention
from spechead.heads.eagle3 import Eagle3, Eagle3Config
from spechead.heads.layers import RMSNorm
from spechead.target.model import Target, TargetOutput
from spechead.training.train import train
from tests.helpers import targets
from tests.helpers.heads import fit, sample, step
from tests.helpers.targets import make_target
from tests.helpers.training import recipe, weights, write_tiny

SIZE, INNER = 32, 48


def make_head(target: Target, **options: Any) -> Eagle3:
    torch.manual_seed(0)
    head = Eagle3(Eagle3Config(**{"draft_vocab_size": 0} | options), target)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size) * 2)
    head.init_from_target()
    return head


def shaken(head: Eagle3) -> Eagle3:
    """With weights of no pattern, norms included."""
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.fixture(scope="module")
def batch() -> Batch:
    return collate([sample(make_target(), 12)], 64)


def seen(head: Eagle3, batch: Batch) -> TargetOutput:
    return head.target.forward(batch.ids, taps=head.taps)


def advanced(head: Eagle3, batch: Batch, steps: int = 1) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(head.unroll(batch, head.start(seen(head, batch)), steps))


def normed(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    assert isinstance(norm, RMSNorm)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


# ------------------------------------------------------------------------------------------------ tensors


def test_tensors_have_the_names_that_servers_load(target: Target) -> None:
    mlp = {
        "mlp.gate_proj.weight": (INNER, SIZE),
        "mlp.up_proj.weight": (INNER, SIZE),
        "mlp.down_proj.weight": (SIZE, INNER),
        "post_attention_layernorm.weight": (SIZE,),
        "self_attn.o_proj.weight": (SIZE, SIZE),
        "input_layernorm.weight": (SIZE,),
    }
    rows = {"q": 32, "k": 16, "v": 16}
    first = mlp | {f"self_attn.{name}_proj.weight": (count, 2 * SIZE) for name, count in rows.items()}
    other = mlp | {f"self_attn.{name}_proj.weight": (count, SIZE) for name, count in rows.items()}
    first |= {"hidden_norm.weight": (SIZE,)}
    one = {"fc.weight": (SIZE, 3 * SIZE), "norm.weight": (SIZE,), "lm_head.weight": (97, SIZE)}
    one |= {f"midlayer.{name}": shape for name, shape in first.items()}
    three = one | {f"layers.{i}.{name}": shape for i in (1, 2) for name, shape in other.items()}
    for options, expected in (
        ({}, one),
        ({"n_layers": 3}, three),
        ({"norm_before_fc": True}, one | {"input_norm.weight": (3 * SIZE,)}),
        ({"fc_norm": True}, one | {f"fc_norm.{i}.weight": (SIZE,) for i in range(3)}),
        ({"norm_output": True, "norm_before_residual": True}, one),
        ({"layers": [0, 7]}, one | {"fc.weight": (SIZE, 2 * SIZE)}),
        ({"draft_vocab_size": 40}, one | {"lm_head.weight": (40, SIZE), "d2t": (40,), "t2d": (97,)}),
    ):
        head = make_head(target, **options)
        assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == expected
        assert set(dict(head.named_parameters())) == set(expected) - {"d2t", "t2d"}


def test_layers_share_nothing(target: Target) -> None:
    head = make_head(target, n_layers=3)
    storage = [parameter.data_ptr() for parameter in head.parameters()]
    assert len(set(storage)) == len(storage)
    assert head.taps == (2, 3, 4)  # the tapped ones keep the name


# ------------------------------------------------------------------------------------------------ norms


def test_the_norms_before_the_fusion(target: Target, batch: Batch) -> None:
    features = seen(make_head(target), batch).features  # [1, T, 3H]
    plain = shaken(make_head(target))
    assert torch.allclose(plain.start(seen(plain, batch)), F.linear(features, plain.fc.weight), atol=1e-5)
    whole = shaken(make_head(target, norm_before_fc=True))
    expected = F.linear(normed(features, whole.input_norm), whole.fc.weight)
    assert torch.allclose(whole.start(seen(whole, batch)), expected, atol=1e-4)
    each = shaken(make_head(target, fc_norm=True))
    parts = [normed(part, norm) for part, norm in zip(features.chunk(3, -1), each.fc_norm, strict=True)]
    expected = F.linear(torch.cat(parts, -1), each.fc.weight)
    assert torch.allclose(each.start(seen(each, batch)), expected, atol=1e-4)


def test_the_norm_before_the_residual(target: Target, batch: Batch) -> None:
    head = shaken(make_head(target))
    start, tokens = head.start(seen(head, batch)), batch.ids
    with torch.no_grad():  # nothing but the residual is left
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        for before, expected in ((False, start), (True, normed(start, head.midlayer.hidden_norm))):
            head.midlayer.norm_before_residual = before
            found = head.advance(start, tokens, batch.positions, [UnrolledAttention(batch.document)])
            assert torch.allclose(found, expected, atol=1e-5)


def test_the_norm_of_the_output_is_fed_back(target: Target, batch: Batch) -> None:
    """At step 0 both ways predict the same; at step 1 they read other states, unless the norm changes nothing."""
    plain, fed = shaken(make_head(target)), shaken(make_head(target, norm_output=True))
    fed.load_state_dict(plain.state_dict())
    before, after = advanced(plain, batch, 2), advanced(fed, batch, 2)
    assert torch.allclose(after[0], normed(before[0], plain.norm), atol=1e-5)
    assert torch.allclose(plain._logits(before[0]), fed._logits(after[0]), atol=1e-4)
    assert not torch.allclose(plain._logits(before[1]), fed._logits(after[1]), atol=1e-2)


# ------------------------------------------------------------------------------------------------ layers and steps


def test_further_layers_start_near_the_identity(target: Target, batch: Batch) -> None:
    head = make_head(target, n_layers=3)
    three = advanced(head, batch)[0]
    head.layers, head.n_layers = nn.ModuleDict(), 1
    one = advanced(head, batch)[0]
    assert 0 < float((three - one).norm() / one.norm()) < 0.1


def test_each_layer_keeps_keys_of_its_own(target: Target, batch: Batch) -> None:
    head = make_head(target, n_layers=3)
    state = head.new_state(batch.ids[0])
    out = seen(head, batch)
    head.propose(state, batch.ids[0, 1:], out.rows(torch.arange(batch.ids.shape[1] - 1)), chain(3))
    keys = [rows._keys for rows in state.rows]
    assert len(keys) == 3 and len({key.data_ptr() for key in keys if key is not None}) == 3


def test_steps_have_the_given_weights(target: Target, batch: Batch) -> None:
    def loss(**options: Any) -> float:
        return float(step(make_head(target, **options), batch).loss.detach())

    first, second = loss(steps=1), loss(steps=2) - loss(steps=1)
    assert second > 0
    assert loss(steps=2, step_decay=0.5) == pytest.approx(first + 0.5 * second, rel=1e-5)
    assert loss(steps=2, step_weights=[3.0, 0.25], step_decay=0.5) == pytest.approx(3 * first + 0.25 * second, rel=1e-5)
    assert loss(steps=2, step_weights=[0.0, 1.0]) == pytest.approx(second, rel=1e-4)


def test_one_loss_is_another_up_to_the_teachers_entropy(target: Target, batch: Batch) -> None:
    """KL and soft cross-entropy have one gradient."""
    gradients = []
    for name in ("soft_ce", "kl"):
        head = make_head(target, loss=name)
        step(head, batch).loss.backward()
        gradients.append([parameter.grad for parameter in head.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("loss", ["tv", "lk_alpha", "lk_lambda"])
def test_losses_of_acceptance_bring_acceptance(loss: str, target: Target, batch: Batch) -> None:
    head = make_head(target, loss=loss, draft_vocab_size=48)
    before = float(step(head, batch).loss.detach())
    fit(head, batch, 20, lr=3e-3)
    assert float(step(head, batch).loss.detach()) < 0.85 * before


def test_eagle_3_1_of_two_layers_learns_a_text(target: Target) -> None:
    head = make_head(target, fc_norm=True, norm_output=True, n_layers=2, loss="hard_ce", steps=2)
    text = sample(target, 10)
    fit(head, collate([text], 64), 100)
    result = generate(target, text.ids[:8].tolist(), head, speculation=Speculation(chain(2)), max_new_tokens=10)
    assert result.tokens == text.ids[8:].tolist()
    assert result.stats.accepted == [min(2, deep) for deep in result.stats.drafted]


def test_a_run_of_many_options_resumes_bit_exactly(tmp_path: Path) -> None:
    options = {"n_layers": 2, "fc_norm": True, "norm_output": True, "loss": "lk_lambda", "step_weights": "[1.0,0.5]"}
    changes = {f"head.options.{name}": value for name, value in options.items()} | {"engine.precision": "bf16"}
    changes |= {"log.best": "false"}
    folder = write_tiny(tmp_path)
    train(recipe(folder, tmp_path / "whole", **changes))
    cut = tmp_path / "cut"
    kept = "checkpoints/step-00000006"
    shutil.copytree(tmp_path / "whole" / kept, cut / kept)
    shutil.copy(tmp_path / "whole" / "recipe.json", cut)
    train(recipe(folder, cut, **changes))
    one, two = weights(tmp_path / "whole"), weights(cut)
    assert "layers.1.mlp.up_proj.weight" in one
    assert all(torch.equal(two[name], tensor) for name, tensor in one.items())


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, r"option head\.options\.loss: 'mse' is not one of"),
        ({"n_layers": 0}, "n_layers: must be at least 1, got 0"),
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"step_weights": [1.0]}, r"step_weights: must be one for each of 3 steps, got \[1\.0\]"),
        ({"step_weights": [1.0, -1.0, 0.0]}, r"step_weights: must be at least 0, got \[1\.0, -1\.0"),
        ({"step_weights": [0.0, 0.0, 0.0]}, "one must be above 0"),
        ({"num_attention_heads": 3}, "num_attention_heads: 3 is not a multiple of num_key_value_heads"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim: must be even .* got 7"),
        ({"rope_theta": -5.0}, r"rope_theta: must be at least 0, got -5\.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor must be above 0, got 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": -2.0}}, r"factor must be above 0, got -2\.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor must be above 0, got two"),
        ({"norm_before_fc": True, "fc_norm": True}, "choose one"),
        ({"hidden_size": 8}, "hidden_size: must be 0 or the target's 32, got 8"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        make_head(target, **options)


def test_the_default_taps_are_distinct_and_ascend_in_a_target_of_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for layers in range(1, 8):
        monkeypatch.setitem(targets.BASE, "num_hidden_layers", layers)
        found[layers] = make_head(make_target()).taps
    assert found == {
        1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (1, 2, 3), 5: (2, 3, 4), 6: (3, 4, 5), 7: (2, 3, 4)
    }  # fmt: skip


def test_layers_are_checked(target: Target) -> None:
    for layers in ([1, 1, 2], [0, 3, 8], [-1, 2, 3]):
        with pytest.raises(UserError, match=r"option head\.options\.layers: must be distinct"):
            make_head(target, layers=layers)
    assert make_head(target, layers=[1, 7]).taps == (1, 7)
