"""Forward hooks that record the hidden states of the tapped layers.

Legend: B batch, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """Records the hidden states `taps` of one forward, which runs inside the context manager."""

    def __init__(self, blocks: nn.ModuleList, taps: Sequence[int]) -> None:
        self._blocks, self._taps = blocks, list(taps)
        self._states: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for layer in set(self._taps) - {len(self._blocks)}:
            if layer == 0:
                hook = self._blocks[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                hook = self._blocks[layer - 1].register_forward_hook(self._recorder(layer))
            self._hooks.append(hook)

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def features(self, last_hidden: Tensor) -> Tensor:
        """[B, T, taps*H] in the order of the taps; the last index is the state after the final norm."""
        states = [self._states.get(layer, last_hidden) for layer in self._taps]
        return torch.cat(states, -1) if states else last_hidden[..., :0]

    def _record_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._states[0] = args[0] if args else kwargs["hidden_states"]

    def _recorder(self, layer: int) -> Any:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            self._states[layer] = output[0] if isinstance(output, tuple) else output

        return record
