"""Tiny random targets of many families and a toy tokenizer. CPU, float32, milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from spechead.target.model import Target

VOCAB = 97


BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


NO_GROUPS: dict[str, Any] = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}


# Tied, a random Gemma repeats its last token whatever it attends to: it scales its embeddings.
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 12, "tie_word_embeddings": False}


EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "llama-tied-one-kv-head": lambda: transformers.LlamaConfig(
        **BASE | {"num_key_value_heads": 1}, tie_word_embeddings=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**BASE),
    "qwen3-wide-heads": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
    "mistral-window": lambda: transformers.MistralConfig(**BASE, sliding_window=12),
    "gemma2": lambda: transformers.Gemma2Config(**BASE, **GEMMA, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**BASE, **GEMMA),
    "phi3": lambda: transformers.Phi3Config(**BASE),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NO_GROUPS),
    "mixtral": lambda: transformers.MixtralConfig(**BASE, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**BASE, **EXPERTS),
    "granite": lambda: transformers.GraniteConfig(**BASE, logits_scaling=2.0),
    "cohere": lambda: transformers.CohereConfig(**BASE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=7, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
}


BORDER = 32  # tokens, beyond which longrope targets use their long factors


def longrope(**more: Any) -> dict[str, Any]:
    """Rotary parameters with factors that differ much on the two sides of the border."""
    short, long = [1.0, 1.3, 1.1, 1.7], [2.0, 3.1, 9.0, 17.0]
    own = {"original_max_position_embeddings": BORDER, "rope_theta": 10000.0}
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **own, **more}


LONGROPE: dict[str, Callable[[], Any]] = {
    "phi3-longrope": lambda: transformers.Phi3Config(
        **BASE, rope_parameters=longrope(), original_max_position_embeddings=BORDER
    ),
    "phimoe-longrope": lambda: transformers.PhimoeConfig(
        **BASE, num_local_experts=4, rope_parameters=longrope(short_mscale=1.1, long_mscale=1.4)
    ),
    "llama-longrope": lambda: transformers.LlamaConfig(**BASE, rope_parameters=longrope()),
}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, ChatML turns, 97 ids."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(c) for c in range(32, 127)][: VOCAB - len(special) - 1] + ["\n"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def make_target(family: str = "llama", *, seed: int = 0, pack: bool = False) -> Target:
    """A random target with weights large enough for varied text, which does not end by chance."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((FAMILIES | LONGROPE)[family]())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        model.get_output_embeddings().weight[2] = 0  # no end-of-sequence token in greedy text
    target = Target(model, make_toy_tokenizer(), f"tiny-{family}")
    if pack:
        target.pack()
    return target
