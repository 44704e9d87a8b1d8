"""Forward hooks that keep the tapped layers' hidden states of one forward.

Legend: B batch, T tokens, K tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """Forward hooks that keep the asked hidden states of one forward, and nothing else."""

    def __init__(self, blocks: nn.ModuleList, taps: Sequence[int]) -> None:
        self._blocks, self._taps = blocks, list(taps)
        self._kept: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for layer in set(self._taps) - {len(self._blocks)}:
            if layer == 0:
                hook = self._blocks[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                hook = self._blocks[layer - 1].register_forward_hook(self._keeper(layer))
            self._hooks.append(hook)

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def features(self, last_hidden: Tensor) -> Tensor:
        """[B, T, K*H] in the order asked; the last index is the state after the final norm."""
        states = [self._kept.get(layer, last_hidden) for layer in self._taps]
        return torch.cat(states, -1) if states else last_hidden[..., :0]

    def _keep_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kept[0] = args[0] if args else kwargs["hidden_states"]

    def _keeper(self, layer: int) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            self._kept[layer] = output[0] if isinstance(output, tuple) else output

        return keep
