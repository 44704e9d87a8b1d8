"""Rotary positions of targets with longrope scaling, which have one set of factors for short texts and one for long.

transformers chooses the set by the largest position of a whole forward. Rows of a batch and packed documents are texts
of their own, so that here each document of each row gets the set that it would get alone.

Legend: B batch, T new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spechead.errors import UserError

_KINDS = ("longrope", "su")  # su: its name in early configs


class SwitchingRotary:
    """The rotary modules of a decoder whose factors switch at `border` tokens.

    `rereads`: transformers reads a whole text again with the long factors when it outgrows the border, so that no
    cached key keeps the short ones. Otherwise the cached keys stay as they are.
    """

    def __init__(self, border: int, rereads: bool, modules: list[nn.Module]) -> None:
        self.border, self.rereads = border, rereads
        self._modules = modules

    @classmethod
    def of(cls, model: Any, decoder: nn.Module, config: Any, name: str) -> SwitchingRotary | None:
        """The rotary of a longrope target; None for others. Raises UserError where its modules are not found."""
        border = longrope_border(config)
        if border is None or border >= (getattr(config, "max_position_embeddings", None) or 1 << 30):
            return None
        modules = [module for module in decoder.modules() if "RotaryEmbedding" in type(module).__name__]
        if not modules:
            raise UserError(
                f"target {name!r} ({config.model_type}) scales its positions by longrope in no known module"
            )
        return cls(border, _rereads(model, border), modules)

    @contextmanager
    def by_document(self, positions: Tensor) -> Iterator[None]:
        """Within the context, a token at `positions` [B, T] gets the factors of its own document, which begins at
        position 0 or in the cache."""
        long = self._long(positions)[..., None]  # [B, T, 1]
        short_positions = positions.clamp(max=self.border - 1)
        beyond = positions.new_full((positions.shape[0], 1), self.border)
        long_positions = torch.cat([positions, beyond], 1)  # [B, T+1]; the last one makes transformers switch

        def choose(module: nn.Module, args: Any, kwargs: Any, _: Any) -> tuple[Tensor, ...]:
            short, extended = (_rotary(module, args, kwargs, p) for p in (short_positions, long_positions))
            return tuple(torch.where(long, e[:, :-1], s) for s, e in zip(short, extended, strict=True))

        hooks = [module.register_forward_hook(choose, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _long(self, positions: Tensor) -> Tensor:  # [B, T] -> bool [B, T]
        """Whether the document of each token has a position beyond the border."""
        document = (positions == 0).cumsum(-1)  # [B, T], from 0 to T
        beyond = (positions >= self.border).long()
        count = beyond.new_zeros(positions.shape[0], positions.shape[1] + 1).scatter_add_(1, document, beyond)
        return count.gather(1, document) > 0


def longrope_border(config: Any) -> int | None:
    """The length up to which a longrope config uses its short factors; None for configs without longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [kind for kind in rope.values() if isinstance(kind, dict)]
    for parameters in by_layer_type or [rope]:
        if parameters.get("rope_type", parameters.get("type")) in _KINDS:
            own = parameters.get("original_max_position_embeddings")
            return own or getattr(config, "original_max_position_embeddings", None)
    return None


def grows_with_length(config: Any) -> bool:
    """Whether the rotary base changes with every token beyond the model's length (dynamic scaling)."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    return any("dynamic" in str(kind.get("rope_type", kind.get("type"))) for kind in kinds)


def _rereads(model: Any, border: int) -> bool:
    """Whether `generate` drops the cache of this model at the border."""
    try:
        source = inspect.getsource(type(model).prepare_inputs_for_generation)
    except (OSError, TypeError):  # no source file
        return False
    name = "original_max_position_embeddings"
    return name in source and getattr(model.config, name, None) == border


def _rotary(module: nn.Module, args: Any, kwargs: Any, positions: Tensor) -> Any:
    """The module's cosine and sine at `positions` in place of those it was called with."""
    if "position_ids" in kwargs:
        return module.forward(*args, **kwargs | {"position_ids": positions})
    return module.forward(args[0], positions, *args[2:], **kwargs)
