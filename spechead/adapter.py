"""Adapters on a target (LoRA and its relatives): peft's edge. One is merged when a target is loaded, or trained in it.

Knows nothing of heads or of how the training goes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spechead.errors import UserError, first_line
from spechead.files import make_folder, reason

FOLDER = "adapter"  # inside the folder of a head that was trained together with it
_SCALING = ("peft_type", "r", "alpha", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def merge(model: Any, source: str, digest: str) -> str:
    """Add the adapter in the folder (or of the hub id) `source` to the weights of `model`, in their own dtype.

    Returns the fingerprint of the sum, made of the model's own `digest` and of the adapter as it is stored, so that it
    does not depend on rounding. Raises ValueError or OSError where the adapter does not fit.
    """
    from peft import PeftModel

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    wrapped = PeftModel.from_pretrained(model, source)
    if (model.get_input_embeddings(), model.get_output_embeddings()) != ends and model.config.tie_word_embeddings:
        raise ValueError("it changes the embeddings or the output layer, which are one and the same in this target")
    if wrapped.active_peft_config.is_prompt_learning:
        raise ValueError(f"adapter {source!r} adds tokens, not weights, and cannot be merged")
    digest = _fingerprint(wrapped, digest)
    wrapped.merge_and_unload(safe_merge=True)
    return digest


class Adapter:
    """Trainable weights inside a model that is otherwise frozen; new ones change nothing until they are trained."""

    def __init__(self, model: Any, options: dict[str, Any], name: str) -> None:
        """`options`: the fields of a peft config, `peft_type` among them. Raises UserError where they do not fit."""
        from peft import get_peft_config, get_peft_model

        if options.get("bias", "none") != "none":
            raise UserError("option adapter.peft: bias must be none, or the target without the adapter changes, too")
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        before = _said(model)
        try:
            config = get_peft_config({"peft_type": "LORA", **options})
            if config.is_prompt_learning:
                raise UserError(f"option adapter.peft: {config.peft_type} adds tokens; take one that adds weights")
            self._wrapped = get_peft_model(model, config)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"option adapter.peft: {first_line(error)}") from error
        if (model.get_input_embeddings(), model.get_output_embeddings()) != ends:
            raise UserError(
                "option adapter.peft: the embeddings and the output layer must stay as they are, since heads read "
                "them; take them out of target_modules and modules_to_save"
            )
        with self.off():
            without = _said(model)
        if not all(torch.allclose(said, before, rtol=0.05, atol=0.05) for said in (_said(model), without)):
            raise UserError(
                "option adapter.peft: a new adapter must change nothing, and the target must be itself without it; "
                "leave init_lora_weights at its default"
            )
        config.base_model_name_or_path = name
        self.parameters: list[nn.Parameter] = [p for p in self._wrapped.parameters() if p.requires_grad]

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without the adapter."""
        with self._wrapped.disable_adapter():
            yield

    def train(self, mode: bool) -> None:
        """Dropout on or off: the adapter's own, never the model's."""
        for name, module in self._wrapped.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" in name:
                module.train(mode)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Take over the values of `parameters`, in their order."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.to(parameter.device, torch.float32)

    def save(self, folder: Path) -> None:
        """Write a standard peft adapter, whole or not at all."""
        make_folder(folder.parent)
        scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        try:
            self._wrapped.save_pretrained(str(scratch), save_embedding_layers=False)  # the rest would ask the hub
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {reason(error)}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def fingerprint(self, digest: str) -> str:
        """What `merge` will give for the model with this adapter as it is now."""
        return _fingerprint(self._wrapped, digest)


@torch.no_grad()
def _said(model: Any) -> Tensor:
    """What the model says behind a few tokens, [1, 3, V]."""
    ids = torch.arange(1, 4, device=model.get_input_embeddings().weight.device)[None]
    return model(input_ids=ids % model.config.get_text_config().vocab_size, use_cache=False).logits.float()


def _fingerprint(wrapped: Any, digest: str) -> str:
    """sha256 over the model's digest, every tensor of the adapter, and what scales them."""
    from peft import get_peft_model_state_dict

    options = wrapped.active_peft_config.to_dict()
    scaling = {name: options[name] for name in _SCALING if name in options}
    found = hashlib.sha256(digest.encode() + json.dumps(scaling, sort_keys=True, default=str).encode())
    for name, tensor in sorted(get_peft_model_state_dict(wrapped, save_embedding_layers=False).items()):
        found.update(f"{name}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
