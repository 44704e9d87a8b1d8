"""Load a transformers model and its tokenizer by name (bundled, folder or hub id), and fingerprint its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.utils import cached_file

from spechead.errors import UserError, first_line
from spechead.target import bundled
from spechead.target.adapter import merge

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IF_THERE: dict[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}
_SAMPLED = 4096  # weights of each tensor in the fingerprint


def choose_device(name: str) -> torch.device:
    """The device called `name`; auto takes the accelerator of this process where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"option device: must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"option device: torch finds no accelerator for {name!r} on this machine; use cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device computes bfloat16 natively: newer accelerators, and CPUs with AVX-512 BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def load_model(name: str, *, trust_remote_code: bool = False) -> Any:
    """The model with its weights in the dtype that they are stored in, on the CPU.

    Raises UserError where the files lack weights, which transformers would leave at random values.
    """
    transformers_logging.disable_progress_bar()
    with loading(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source(name), dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"target {name!r}: its files lack {len(missing)} weights ({', '.join(missing[:3])}, ...); save the model "
            "whole, from a Target loaded with pack=False"
        )
    return model


def load_tokenizer(name: str, adapter: str = "", *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a target, without its weights: the adapter's own where it has one, with its chat template.

    Raises UserError where the adapter's tokenizer gives the target's tokens other ids.
    """
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(source(name), trust_remote_code=trust_remote_code)
    if not adapter or not cached_file(adapter, "tokenizer_config.json", **_IF_THERE):
        return tokenizer
    with loading(adapter):
        own = AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code)
    if not tokenizer.get_vocab().items() <= own.get_vocab().items():
        raise UserError(
            f"option adapter: the tokenizer in {adapter!r} has other ids than that of {name!r}; give as the target the "
            "model that the adapter was made for, or remove the tokenizer from the adapter's folder"
        )
    own.chat_template = own.chat_template or tokenizer.chat_template
    return own


def load_limits(name: str, *, trust_remote_code: bool = False) -> tuple[int, int]:
    """The rows of a target's embedding and the positions it can take, by its config; 0 rows where that names none."""
    with loading(name):
        config = AutoConfig.from_pretrained(source(name), trust_remote_code=trust_remote_code).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 1 << 30
    return getattr(config, "vocab_size", None) or 0, positions


def load_in_four_bits(name: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """The model loaded by bitsandbytes, its linear layers except the output layer in nf4."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("option target.four_bits: needs the package bitsandbytes: pip install bitsandbytes")
    layout = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    with loading(name):
        return AutoModelForCausalLM.from_pretrained(
            source(name),
            dtype=dtype,
            quantization_config=layout,
            device_map={"": str(device)},
            trust_remote_code=trust_remote_code,
        )


def merge_adapter(model: PreTrainedModel, adapter: str, digest: str, name: str) -> str:
    """Merge an adapter into the model in float32; returns the fingerprint of the result."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    try:
        return merge(model, adapter, digest, name)
    except Exception as error:  # peft and safetensors raise anything for foreign files
        raise UserError(f"option adapter: {adapter!r} does not fit this target: {first_line(error)}") from error


def source(name: str) -> str:
    """The folder or hub id that transformers loads."""
    return str(bundled.folder()) if name == bundled.NAME else name


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn the errors of transformers into one line that names the target."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        known = "" if Path(name).is_dir() else f" (expected a folder, a hub id or {bundled.NAME!r})"
        raise UserError(f"target {name!r} cannot be loaded{known}: {first_line(error)}") from error


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 over every tensor's name, shape and evenly spaced values; it differs after any fine-tuning."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].to(torch.bfloat16).cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
