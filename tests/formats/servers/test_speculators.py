"""speculators: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.formats.servers.expected import DRAFT, LAYER, NO_NORMS, TOKENS, H, export, has, shapes, without_prefix
from tests.helpers.exporting import tiny


def test_speculators(tmp_path: Path) -> None:
    config, tensors, _ = export("speculators", "eagle3", tmp_path)
    assert shapes(tensors) == without_prefix("layers.0.") | {"embed_tokens.weight": (TOKENS, H)}
    assert torch.equal(tensors["embed_tokens.weight"], tiny("llama").model.get_input_embeddings().weight)
    assert has(config, NO_NORMS | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]})
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and config["draft_vocab_size"] == DRAFT
    assert has(config["transformer_layer_config"], LAYER)
    inner = config["speculators_config"]
    assert inner["algorithm"] == "eagle3" and inner["default_proposal_method"] == "greedy"
    assert inner["proposal_methods"][0]["speculative_tokens"] == 3
    assert inner["verifier"] == {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
