"""Start a head from an earlier one's weights; its draft vocabulary stays unless it is to be extended or made anew.

Knows nothing of training data or of how a head is trained.

Legend: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.heads import Head
from spechead.heads.files import head_adapter, head_fingerprint, head_target, read_head
from spechead.target.model import Target

_OUTPUT = "lm_head"  # how the names of tensors begin that have a row for each token of the draft vocabulary
_MAP = ("d2t", "t2d")
# Options that change what weights mean and no shape that would tell, and those that change which weights there are
_MEANING = ["layers", "head_dim", "rope_theta", "rope_scaling"]
_MEANING += ["norm_before_residual", "norm_output", "norm_embeddings"]
_BUILDING = ["n_layers", "n_heads", "output", "prefix", "norm_before_fc", "fc_norm", "fc_bias", "attention_bias"]


def other_target(folder: Path, target: Target) -> str:
    """A warning where the head in `folder` was trained for other weights than the target's, else nothing."""
    if head_fingerprint(folder) == target.fingerprint:
        return ""
    carried = head_adapter(folder)
    whose = f"{head_target(folder)!r}" + (f" with target.adapter {carried}" if carried else "")
    return f"head.init_from {folder} was trained for target {whose}; the weights of {target.name!r} differ"


class InitHead:
    """The head in `folder`, whose weights `head` is to start from.

    Raises UserError where it is of another kind or shape.
    """

    def __init__(self, folder: Path, head: Head) -> None:
        kind, config, self._state = read_head(folder)
        if kind != head.kind:
            raise UserError(f"head.init_from {folder} holds a head of kind {kind}, not {head.kind}")
        self._folder, self._head = folder, head
        theirs, mine = self._vocabulary(), head.target.vocab_size
        if theirs != mine:
            raise UserError(
                f"head.init_from {folder}: its target {head_target(folder)!r} has {theirs} tokens, "
                f"{head.target.name!r} has {mine}; start from a head for the same vocabulary"
            )
        names = self._state.keys() - set(_MAP)
        ours = {name: tensor for name, tensor in head.state_dict().items() if name not in _MAP}
        if names != ours.keys():
            self._refuse_other(config, _BUILDING)
            self._refuse(f"has other tensors: {', '.join(sorted(names ^ ours.keys())[:3])} ...")
        for name, tensor in ours.items():
            rows = 1 if name.startswith(_OUTPUT) else 0  # of the vocabulary, of which there may be others
            if self._state[name].shape[rows:] != tensor.shape[rows:]:
                self._refuse(f"has {name} of shape {tuple(self._state[name].shape)}, not {tuple(tensor.shape)}")
        self._refuse_other(config, _MEANING)

    def _vocabulary(self) -> int:
        """How many tokens its target has; ours, where nothing in the head is as long."""
        rows = [len(tensor) for name, tensor in self._state.items() if name.startswith(_OUTPUT)]
        return len(self._state["t2d"]) if "t2d" in self._state else max(rows, default=self._head.target.vocab_size)

    @property
    def ids(self) -> Tensor:
        """The target ids of its draft vocabulary, int64 [D], ascending."""
        if "d2t" not in self._state:
            return torch.arange(self._head.target.vocab_size)
        return torch.arange(len(self._state["d2t"])) + self._state["d2t"]

    def kept_ids(self, how: str) -> Tensor | None:
        """The ids that the new draft vocabulary must hold; None where it is made anew.

        `how`: keep, extend or remap. Raises UserError where the new one is of another size, or has no room.
        """
        if how == "remap":
            return None
        size, held = self._head.draft_size, len(self.ids)
        if held > size or (how == "keep" and held < size):
            raise UserError(
                f"head.options.draft_vocab_size: the head has {size} tokens, that of head.init_from {self._folder} "
                f"{held}; make them equal, or choose head.init_vocabulary extend (to more) or remap"
            )
        return self.ids

    @torch.no_grad()
    def copy_into_head(self) -> None:
        """Copy the weights; of output layers the rows of tokens that both vocabularies have."""
        target, mine = self._head.target, self._head.draft_ids()
        row_of = torch.full((target.vocab_size,), -1)  # [V]
        row_of[self.ids] = torch.arange(len(self.ids))
        rows = row_of if mine is None else row_of[mine.cpu()]  # [D]: where each of our tokens is in the earlier head
        for name, ours in self._head.state_dict().items():
            if name.startswith(_OUTPUT):
                ours[rows.to(ours.device) >= 0] = self._state[name][rows[rows >= 0]].to(ours)
            elif name not in _MAP:
                ours.copy_(self._state[name])

    def _refuse_other(self, config: Any, options: Sequence[str]) -> None:
        for option in options:
            was, now = getattr(config, option, None), getattr(self._head.config, option, None)
            if was != now:
                self._refuse(f"has head.options.{option} {was}, not {now}")

    def _refuse(self, why: str) -> None:
        raise UserError(f"head.init_from {self._folder} does not fit head.options: it {why}")
