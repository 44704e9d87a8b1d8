"""Rotary factors by document and row, against each text alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from spechead.data.dataset import Sample, collate
from spechead.errors import UserError
from spechead.heads import HEADS
from spechead.target.switching_rotary import SwitchingRotary, grows_with_length, longrope_border
from spechead.training.module import FeatureCache, TrainingModule
from tests.helpers.drafters import prompt_of
from tests.helpers.targets import BASE, BORDER, LONGROPE, longrope, make_target


@pytest.mark.parametrize("family", LONGROPE)
def test_packed_documents_have_the_hidden_states_of_each_alone(family: str) -> None:
    target = make_target(family)
    texts = [torch.tensor(prompt_of(length, length)) for length in (BORDER + 9, BORDER, 5, BORDER + 1, BORDER - 1)]
    samples = [Sample(text, torch.ones(len(text), dtype=torch.bool), i) for i, text in enumerate(texts)]
    batch = collate(samples, 128)
    head = HEADS["medusa"](HEADS["medusa"].Config(), target)
    out = TrainingModule(head, FeatureCache(0)).target_output(batch)
    assert batch.ids.shape[0] < len(texts)  # some share a row
    seen = 0
    for row in range(batch.ids.shape[0]):
        for document in range(int(batch.document[row].max()) + 1):
            places = (batch.document[row] == document).nonzero()[:, 0]
            alone = target.forward(batch.ids[row, places][None]).hidden[0]
            assert torch.allclose(out.hidden[row, places], alone, atol=1e-4)
            seen += 1
    assert seen == len(texts)


def test_the_factors_of_both_sides_differ() -> None:
    target = make_target("phi3-longrope")
    ids = torch.tensor([prompt_of(BORDER + 1)])
    within, across = target.forward(ids[:, :-1]).hidden, target.forward(ids).hidden[:, :-1]
    assert not torch.allclose(within, across, atol=0.1)


def test_no_hook_stays_in_the_model() -> None:
    target = make_target("llama-longrope")
    target.forward(torch.tensor([prompt_of(BORDER + 1)]))
    assert not any(module._forward_hooks for module in target.model.modules())


def test_the_border_is_read_from_all_kinds_of_configs() -> None:
    assert longrope_border(SimpleNamespace()) is None and longrope_border(transformers.LlamaConfig()) is None
    early = SimpleNamespace(rope_parameters={"type": "su"}, original_max_position_embeddings=7)
    assert longrope_border(early) == 7
    by_type = {"sliding_attention": {"rope_type": "default"}, "full_attention": longrope()}
    assert longrope_border(SimpleNamespace(rope_parameters=by_type)) == BORDER
    same = transformers.LlamaConfig(**BASE | {"max_position_embeddings": BORDER}, rope_parameters=longrope())
    assert SwitchingRotary.of(None, nn.Identity(), same, "x") is None  # no text is long enough


def test_a_rotary_that_is_not_found_is_refused() -> None:
    config = transformers.LlamaConfig(**BASE, rope_parameters=longrope())
    with pytest.raises(UserError, match=r"target 'x' \(llama\) scales its positions by longrope in no known"):
        SwitchingRotary.of(None, nn.Identity(), config, "x")


def test_dynamic_scaling_is_recognised() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert grows_with_length(transformers.LlamaConfig(rope_parameters=dynamic))
    assert not grows_with_length(transformers.LlamaConfig()) and not grows_with_length(SimpleNamespace())
