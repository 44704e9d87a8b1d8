"""TensorRT-LLM: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

from pathlib import Path

from tests.formats.servers.expected import DRAFT, EAGLE3, LAYER, H, export, has, shapes


def test_trtllm_eagle3(tmp_path: Path) -> None:
    config, tensors, _ = export("trtllm", "eagle3-fusion", tmp_path)
    assert shapes(tensors) == EAGLE3 | {"input_norm.weight": (3 * H,)}
    assert config["eagle_config"] == {"norm_before_fc": True}
    assert has(config, LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT})
