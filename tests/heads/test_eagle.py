"""EAGLE and HASS: names of tensors, the loss by hand, noise, the frozen output layer, biases, several layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spechead.data.dataset import Batch, collate
from spechead.decoding.tree import Dynamic
from spechead.errors import UserError
from spechead.heads.eagle import Eagle, EagleConfig
from spechead.heads.losses import feature_regression, soft_cross_entropy, topk_distillation
from spechead.target.model import Target, TargetOutput
from tests.helpers.heads import check_unrolled, fit, sample, step
from tests.helpers.targets import make_target


def make_head(target: Target, **options: Any) -> Eagle:
    torch.manual_seed(0)
    head = Eagle(EagleConfig(**options), target)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size) * 2)  # every other token, so that the map matters
    head.init_from_target()
    return head


def seen(target: Target, batch: Batch) -> TargetOutput:
    return target.forward(batch.ids)


# ------------------------------------------------------------------------------------------------ tensors


def test_tensors_have_the_names_that_servers_load(target: Target) -> None:
    size, inner = 32, 48
    layer = {
        "self_attn.q_proj.weight": (size, size),
        "self_attn.k_proj.weight": (16, size),
        "self_attn.v_proj.weight": (16, size),
        "self_attn.o_proj.weight": (size, size),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "post_attention_layernorm.weight": (size,),
    }
    one = {"fc.weight": (size, 2 * size)} | {f"layers.0.{name}": shape for name, shape in layer.items()}
    two = one | {f"layers.1.{name}": shape for name, shape in layer.items()}
    two["layers.1.input_layernorm.weight"] = (size,)
    for options, expected in (
        ({}, one),
        ({"n_layers": 2}, two),
        ({"fc_bias": True}, one | {"fc.bias": (size,)}),
        ({"draft_vocab_size": 40}, one | {"d2t": (40,), "t2d": (97,)}),
    ):
        head = make_head(target, **options)
        assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == expected
        assert set(dict(head.named_parameters())) == set(expected) - {"d2t", "t2d"}
        assert head.taps == ()  # it taps none


def test_layers_share_nothing(target: Target) -> None:
    storage = [parameter.data_ptr() for parameter in make_head(target, n_layers=3).parameters()]
    assert len(set(storage)) == len(storage)


def test_the_default_tree_is_the_dynamic_one(target: Target) -> None:
    assert make_head(target).tree == Dynamic(nodes=60, depth=6, topk=10)


def test_biases_follow_the_target(target: Target) -> None:
    qwen = make_target("qwen2")
    biases = {f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    for owner, options, expected in (
        (target, {}, set()),
        (target, {"attention_bias": True}, biases),
        (qwen, {}, biases),
        (qwen, {"attention_bias": False}, set()),
    ):
        head = make_head(owner, **options)
        assert {name for name in head.state_dict() if name.endswith("bias")} == expected
        assert head.config.attention_bias == bool(expected)
        step(head, collate([sample(owner)], 64)).loss.backward()
        for name, parameter in head.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "options",
    [
        {"n_layers": 2, "steps": 3},
        {"attention_bias": True, "fc_bias": True, "steps": 3, "draft_vocab_size": 40},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rope_theta": 100.0, "steps": 3},
    ],
)
def test_every_shape_trains_as_it_drafts(options: dict[str, Any], target: Target) -> None:
    check_unrolled(make_head(target, **options), target)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"steps": 0}, r"options\.steps: must be at least 1, got 0"),
        ({"n_layers": 0}, "n_layers: must be at least 1, got 0"),
        ({"topk": 0}, "topk: must be at least 1, got 0"),
        ({"noise": -0.1}, r"noise: must be at least 0, got -0\.1"),
        ({"logit_weight": -1.0}, "logit_weight: must be at least 0"),
        ({"feature_weight": 0.0, "logit_weight": 0.0}, "set one of them above 0"),
        ({"hidden_size": 8}, "hidden_size: must be 0 or the target's 32, got 8"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        make_head(target, **options)


@torch.no_grad()
def test_embedding_and_feature_start_with_equal_shares() -> None:
    own = make_target()
    own.model.get_input_embeddings().weight.mul_(0.01)
    head = make_head(own)
    hidden = seen(own, collate([sample(own)], 64)).hidden  # of the size that the final norm's weight gives
    embedded = own.embed(torch.arange(own.vocab_size))
    assert embedded.std() < 0.01 * hidden.std()
    shares = [(x @ half.T).std() for x, half in zip((embedded, hidden), head.fc.weight.split(32, 1), strict=True)]
    assert float(shares[0]) == pytest.approx(float(shares[1]), rel=0.25)


# ------------------------------------------------------------------------------------------------ losses


def test_feature_regression_by_hand() -> None:
    predicted = torch.tensor([[0.5, 3.0], [1.0, 1.0]])
    true = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert float(feature_regression(predicted, true)) == pytest.approx((0.5 * 0.25 + (2.0 - 0.5)) / 2)


def test_topk_distillation_by_hand() -> None:
    teacher = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    logits = torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.2, 0.6]]).log() + 7  # a shift changes nothing
    expected = -(0.5 * math.log(0.25) + 0.3 * math.log(0.25)) - (0.8 * math.log(0.6) + 0.1 * math.log(0.2))
    assert float(topk_distillation(logits, teacher, 2)) == pytest.approx(expected, rel=1e-5)
    for k in (3, 10):  # all tokens: the plain cross-entropy
        whole = float(soft_cross_entropy(logits, teacher))
        assert float(topk_distillation(logits, teacher, k)) == pytest.approx(whole, rel=1e-5)


def test_the_loss_is_the_papers(target: Target) -> None:
    """Row by row: feature t+1 and the distribution behind it, wherever token t+2 is the assistant's."""
    head = make_head(target, noise=0.0, topk_weight=0.5, topk=5)
    batch = collate([sample(target)], 64)
    truth = seen(target, batch).hidden[0]  # [T, H]
    with torch.no_grad():
        (hidden,) = head.unroll(batch, truth[None], 1)
    expected, length = 0.0, batch.ids.shape[1]
    for t in range(length - 2):
        if batch.supervised[0, t + 2]:
            predicted = hidden[0, t]
            p, q = target.logits(truth[t + 1]).softmax(-1), target.logits(predicted).softmax(-1)
            best = p.topk(5).indices
            expected += float(F.smooth_l1_loss(predicted, truth[t + 1]))
            expected += 0.1 * float(-(p * q.log()).sum()) + 0.5 * float(-(p * q.log())[best].sum())
    assert float(step(head, batch).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_steps_add_up_and_decay(target: Target) -> None:
    batch = collate([sample(target)], 64)
    losses = {}
    for steps, decay in ((1, 1.0), (2, 1.0), (2, 0.5)):
        head = make_head(target, noise=0.0, steps=steps, step_decay=decay)
        losses[steps, decay] = float(step(head, batch).loss.detach())
    first, second = losses[1, 1.0], losses[2, 1.0] - losses[1, 1.0]
    assert second > 0
    assert losses[2, 0.5] == pytest.approx(first + 0.5 * second, rel=1e-5)


def test_detached_steps_keep_their_gradient_to_themselves(target: Target) -> None:
    batch = collate([sample(target)], 64)
    found = {}
    for detach in (False, True):
        head = make_head(target, noise=0.0, steps=3, detach_steps=detach)
        loss = step(head, batch).loss
        loss.backward()
        assert head.fc.weight.grad is not None
        found[detach] = float(loss.detach()), head.fc.weight.grad
    assert found[True][0] == found[False][0]
    assert not torch.allclose(found[True][1], found[False][1])
    start = torch.zeros(1, batch.ids.shape[1], 32, requires_grad=True)
    *_, last = make_head(target).unroll(batch, start, 2, detach=True)
    last.sum().backward()
    assert start.grad is None


def test_a_token_outside_the_draft_vocabulary_still_teaches_its_feature(target: Target) -> None:
    head = make_head(target, noise=0.0, draft_vocab_size=40)
    batch = collate([sample(target)], 64)
    head.set_vocabulary(torch.tensor(sorted(set(range(97)) - set(batch.ids[0].tolist()))[:40]))
    result = step(head, batch)
    bare = make_head(target, noise=0.0, logit_weight=0.0)
    assert float(result.loss.detach()) == pytest.approx(float(step(bare, batch).loss.detach()), rel=1e-6)
    assert not result.hits.correct.any() and result.hits.supervised.any()


# ------------------------------------------------------------------------------------------------ noise


def test_noise_is_uniform_and_for_training_alone(target: Target) -> None:
    head = make_head(target, noise=0.1)
    batch = collate([sample(target)], 64)
    true = torch.zeros(4, 500, 32)
    off = head._noisy(true, batch)
    assert 0.099 < off.max() <= 0.1 and -0.1 <= off.min() < -0.099 and not true.any()
    assert off.mean().abs() < 1e-3 and off.std() == pytest.approx(0.1 / math.sqrt(3), rel=0.02)
    quiet = make_head(target, noise=0.0)
    expected = float(step(quiet, batch).loss.detach())
    assert float(step(head, batch).loss.detach()) != expected
    assert float(step(head.eval(), batch).loss.detach()) == expected


def test_noise_follows_the_seed_and_differs_between_calls_and_conversations(target: Target) -> None:
    head = make_head(target)
    one, two = collate([sample(target)], 64), collate([sample(target)], 64)
    two.rows = [1]
    true = torch.zeros(1, 5, 32)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [head._noisy(true, one), head._noisy(true, one)]

    first, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(*first)
    torch.manual_seed(7)
    assert not torch.equal(head._noisy(true, two), first[0])


def test_noise_moves_the_random_state_alike_for_all_batches(target: Target) -> None:
    """Ranks with texts of other lengths must not drift apart: a checkpoint holds the state of one of them."""
    head = make_head(target)
    states = []
    for length in (5, 50):
        torch.manual_seed(7)
        head._noisy(torch.zeros(1, length, 32), collate([sample(target)], 64))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# ------------------------------------------------------------------------------------------------ the frozen ends


@pytest.mark.parametrize("family", ["llama", "granite", "cohere", "gemma2"])
@pytest.mark.parametrize("rows", [0, 40])
def test_a_true_feature_is_read_as_the_target_reads_it(family: str, rows: int) -> None:
    own = make_target(family)
    head = make_head(own, draft_vocab_size=rows)
    hidden = seen(own, collate([sample(own)], 64)).hidden[0]
    expected = own.logits(hidden, head.draft_ids())
    trained = head.target_logits(hidden.clone().requires_grad_())
    assert trained.requires_grad and torch.allclose(trained, expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(head._log_probabilities(hidden), expected.log_softmax(-1), atol=1e-5)


@torch.no_grad()
def test_a_head_in_bfloat16_drafts_in_it_on_a_packed_target_too() -> None:
    plain, packed = make_target(), make_target(pack=True)
    hidden = seen(plain, collate([sample(plain)], 64)).hidden[0]
    for rows in (0, 40):
        head = make_head(plain, draft_vocab_size=rows).to(torch.bfloat16)
        weight = plain.output_rows(head.draft_ids())[0].bfloat16()
        expected = F.linear(hidden.bfloat16(), weight).float().log_softmax(-1)
        for target in (plain, packed):
            head.target = target
            assert torch.allclose(head._log_probabilities(hidden.bfloat16()), expected, atol=0.1)  # of up to 20
        exact = plain.logits(hidden, head.draft_ids()).log_softmax(-1)
        assert torch.allclose(expected, exact, atol=0.2)


def test_training_leaves_the_target_alone(target: Target) -> None:
    before = target._output_weight.clone()
    head = make_head(target, noise=0.0)
    fit(head, collate([sample(target)], 64), 3)
    assert torch.equal(target._output_weight, before)
    assert target._output_weight.grad is None and not target._output_weight.requires_grad
