"""Chat templates that behave as those of known families, and toy tokenizers with the control tokens of each.

The templates are files beside this one, `chat_templates/FAMILY.jinja`. They were written for these tests: structure and
behaviour are the family's, system texts are short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chat_templates"
DATE = "2024-07-26"  # the day that the templates show


@dataclass(frozen=True)
class Family:
    """The tokens of a family. `words`: control tokens that are not special, so that decoding shows them."""

    bos: str
    eos: str
    controls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    metaspace: bool = False  # as sentencepiece: a space belongs to the word after it

    @property
    def special(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(token for token in (self.bos, self.eos, *self.controls) if token))


IM = ("<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
DEEPSEEK_CALLS = tuple(
    f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")
)
DEEPSEEK = Family(
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    ("<｜User｜>", "<｜Assistant｜>"),
    (*THINK, *DEEPSEEK_CALLS, "<｜tool▁sep｜>"),
)
FAMILIES: dict[str, Family] = {
    "chatml": Family("", "<|im_end|>", ("<|endoftext|>", *IM)),
    "llama3": Family(
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "qwen2.5": Family("", "<|im_end|>", ("<|endoftext|>", *IM), CALL),
    "qwen3": Family("", "<|im_end|>", ("<|endoftext|>", *IM), (*CALL, *THINK)),
    "deepseek-r1-distill": DEEPSEEK,
    "deepseek-v3": DEEPSEEK,
    "gemma2": Family("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "gemma3": Family("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "mistral-v0.3": Family("<s>", "</s>", (*INST, "[/TOOL_RESULTS]"), metaspace=True),
    "mistral-nemo": Family("<s>", "</s>", (*INST, "[/TOOL_RESULTS]")),
    "phi3": Family("<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "phi4": Family("<|endoftext|>", "<|im_end|>", (*IM, "<|im_sep|>")),
    "gpt-oss": Family(
        "<|startoftext|>",
        "<|return|>",
        ("<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
    "granite3": Family("<|end_of_text|>", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")),
    "smollm3": Family("", "<|im_end|>", ("<|end_of_text|>", *IM), (*CALL, *THINK)),
    "vicuna": Family("<s>", "</s>", metaspace=True),
}


def template(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")


@cache
def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The family's template and control tokens on toy text tokens. Shared: whoever changes it makes another."""
    known = FAMILIES[family]
    tokens = metaspace() if known.metaspace else byte_level()
    return finish(tokens, template(family), known.bos, known.eos, known.special, known.words)


def finish(
    tokens: Tokenizer, template: str, bos: str, eos: str, special: Iterable[str] = (), words: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Add control tokens and a template to text tokens; `bos` may be empty."""
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokens.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token=bos or None, eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": [token for token in special if token not in (bos, eos)]})
    fast.chat_template = template
    return fast


def byte_level() -> Tokenizer:
    """One token a byte, except that runs of up to three line breaks, two dots and a space with an `H` are merged."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), (".", "."), ("Ġ", "H")]
    vocabulary = {token: i for i, token in enumerate([*letters, *(left + right for left, right in merges)])}
    tokens = Tokenizer(models.BPE(vocabulary, merges))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    return tokens


def metaspace() -> Tokenizer:
    """As sentencepiece: a space is part of the letter after it, and a text begins as if after a space."""
    letters = [chr(code) for code in range(33, 127)]
    merges = [("▁", letter) for letter in letters] + [(".", ".")]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", *fallback, "▁", *letters, *(left + right for left, right in merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokens = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokens
