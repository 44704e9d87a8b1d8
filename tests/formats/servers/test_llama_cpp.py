"""llama.cpp: the very names, shapes and numbers that its loader reads, written out by hand."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spechead.errors import UserError
from spechead.formats.gguf_file import read_gguf
from spechead.formats.servers import llama_cpp
from spechead.formats.servers.llama_cpp import _halves, _pairs, _shortest
from tests.formats.servers.expected import TOKENS, WIDE, H, export
from tests.helpers.exporting import make_head, tiny


def test_llama_cpp(tmp_path: Path) -> None:
    _, _, out = export("llama.cpp", "eagle3-other-taps", tmp_path)
    file = read_gguf(out / "model.gguf")
    head = make_head("eagle3-other-taps", tiny("llama")).state_dict()
    settings_of_file = {name: value for name, value in file.settings.items() if not name.startswith("tokenizer.")}
    assert settings_of_file == {
        "general.architecture": "eagle3",
        "general.type": "model",
        "general.name": "EAGLE-3 head for org/model",
        "general.file_type": 0,
        "eagle3.block_count": 1,
        "eagle3.context_length": 256,
        "eagle3.embedding_length": H,
        "eagle3.feed_forward_length": WIDE,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 8,
        "eagle3.attention.value_length": 8,
        "eagle3.attention.layer_norm_rms_epsilon": torch.tensor(1e-6).item(),
        "eagle3.rope.freq_base": 10000.0,
        "eagle3.rope.dimension_count": 8,
        "eagle3.vocab_size": TOKENS,
        "eagle3.extract_layers": [1, 3, 6],
        "eagle3.target_layers": [1, 3, 6],
        "eagle3.target_hidden_size": H,
        "eagle3.norm_before_residual": False,
    }
    assert file.settings["tokenizer.ggml.tokens"][3] == tiny("llama").tokenizer.convert_ids_to_tokens(3)
    assert file.tensors["d2t"].tolist() == list(range(1, 80, 2)) and file.tensors["d2t"].dtype == torch.int64
    same = {
        "fc.weight": "fc.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
        "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
        "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
    }
    assert file.tensors.keys() == same.keys() | {"d2t", "blk.0.attn_q.weight", "blk.0.attn_k.weight"}
    assert all(torch.equal(file.tensors[gguf], head[name]) for gguf, name in same.items())
    query, key = (head[f"midlayer.self_attn.{part}_proj.weight"] for part in "qk")
    first = [0, 4, 1, 5, 2, 6, 3, 7]  # rows of one head of size 8: each beside its partner of the other half
    assert torch.equal(file.tensors["blk.0.attn_q.weight"][:8], query[first])
    assert torch.equal(file.tensors["blk.0.attn_q.weight"][24:], query[24:][first])
    assert torch.equal(file.tensors["blk.0.attn_k.weight"][8:], key[8:][first])


def test_llama_cpp_opens_its_file(tmp_path: Path) -> None:
    """The library that llama-cpp-python brings takes every setting and tensor; drafting with it needs its server."""
    library = pytest.importorskip("llama_cpp")
    _, _, out = export("llama.cpp", "eagle3-other-taps", tmp_path)
    model = library.llama_model_load_from_file(str(out / "model.gguf").encode(), library.llama_model_default_params())
    assert model, "it does not open"
    said = {}
    for name in ("general.architecture", "eagle3.target_hidden_size"):
        text = ctypes.create_string_buffer(64)
        library.llama_model_meta_val_str(model, name.encode(), text, 64)
        said[name] = text.value.decode()
    tokens = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    library.llama_model_free(model)
    assert said == {"general.architecture": "eagle3", "eagle3.target_hidden_size": str(H)}
    assert tokens == len(tiny("llama").tokenizer)


def test_layers_by_both_names_are_the_same(tmp_path: Path) -> None:
    _, _, out = export("llama.cpp", "eagle3-other-taps", tmp_path)
    file = read_gguf(out / "model.gguf")
    first, second = (f"eagle3.{name}" for name in ("extract_layers", "target_layers"))
    assert llama_cpp._layers(file, tiny("llama")) == [1, 3, 6]
    older, other, neither = (copy.deepcopy(file) for _ in range(3))
    del older.settings[second]
    assert llama_cpp._layers(older, tiny("llama")) == [1, 3, 6]
    other.settings[second] = [1, 3, 5]
    with pytest.raises(UserError, match=r"extract_layers \[1, 3, 6\] and target_layers \[1, 3, 5\]: builds"):
        llama_cpp._layers(other, tiny("llama"))
    del neither.settings[first], neither.settings[second]
    with pytest.raises(UserError, match="no extract_layers or target_layers: llama.cpp stops"):
        llama_cpp._layers(neither, tiny("llama"))


@given(heads=st.integers(1, 5), half=st.integers(1, 4), inputs=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_pairs_and_halves_are_inverse(heads: int, half: int, inputs: int) -> None:
    rows = torch.arange(heads * 2 * half * inputs).view(-1, inputs)
    pairs = _pairs(rows, heads)
    assert torch.equal(_halves(pairs, heads), rows)
    for head in range(heads):  # first of a half, then its partner of the other half
        rows_of_head, pairs_of_head = (x.view(heads, 2 * half, inputs)[head] for x in (rows, pairs))
        assert torch.equal(pairs_of_head[0::2], rows_of_head[:half])
        assert torch.equal(pairs_of_head[1::2], rows_of_head[half:])


@given(st.sampled_from([1e-5, 1e-6, 1e-12, 10000.0, 5e5, 1e6, 150000.0, 0.3]))
def test_a_float32_is_read_as_the_decimal_it_was(value: float) -> None:
    assert _shortest(float(torch.tensor(value, dtype=torch.float32))) == value
