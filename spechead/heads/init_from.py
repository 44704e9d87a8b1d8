"""Start a head from the weights of an earlier one, whose draft vocabulary is kept, extended or replaced.

Legend: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.heads.base import Head, Role, options_with
from spechead.heads.files import WEIGHTS, read_info, read_tensors
from spechead.target.model import Target

_OUTPUT = "lm_head"  # prefix of the tensors that have a row for each token of the draft vocabulary
_MAPS = ("d2t", "t2d")


def target_warning(folder: Path, target: Target) -> str:
    """A warning if the head in `folder` was trained for a target with other weights, else ""."""
    info = read_info(folder)
    if info.fingerprint == target.fingerprint:
        return ""
    adapted = f" with target.adapter {info.adapter}" if info.adapter else ""
    return (
        f"option head.init_from: {folder} was trained for target {info.target!r}{adapted}; the weights of "
        f"{target.name!r} differ"
    )


class InitHead:
    """The head in `folder`, from whose weights `head` starts. Raises UserError if kind or shapes differ."""

    def __init__(self, folder: Path, head: Head) -> None:
        self._info, self._head = read_info(folder), head
        self._config, self._state = self._info.config, read_tensors(folder / WEIGHTS)
        if self._info.kind != head.kind:
            raise UserError(f"option head.init_from: {folder} is a head of kind {self._info.kind}, not {head.kind}")
        total = self._target_vocabulary()
        if total != head.target.vocab_size:
            raise UserError(
                f"option head.init_from: the target {self._info.target!r} of {folder} has {total} tokens, "
                f"{head.target.name!r} has {head.target.vocab_size}; start from a head for the same vocabulary"
            )
        self._check_tensors()
        self._check_options(options_with(head.Config, Role.MEANING))

    def _check_tensors(self) -> None:
        names = self._state.keys() - set(_MAPS)
        wanted = {name: tensor for name, tensor in self._head.state_dict().items() if name not in _MAPS}
        if names != wanted.keys():
            self._check_options(options_with(self._head.Config, Role.COUNT, Role.TENSORS))
            raise self._misfit(f"it has other tensors: {', '.join(sorted(names ^ wanted.keys())[:3])} ...")
        for name, tensor in wanted.items():
            first = 1 if name.startswith(_OUTPUT) else 0  # draft vocabularies may differ
            shape = self._state[name].shape
            if shape[first:] != tensor.shape[first:]:
                raise self._misfit(f"it has {name} of shape {tuple(shape)}, not {tuple(tensor.shape)}")

    def _target_vocabulary(self) -> int:
        """The vocabulary size of its target; the new target's if no tensor shows it."""
        rows = [len(tensor) for name, tensor in self._state.items() if name.startswith(_OUTPUT)]
        return len(self._state["t2d"]) if "t2d" in self._state else max(rows, default=self._head.target.vocab_size)

    @property
    def ids(self) -> Tensor:
        """The target ids of its draft vocabulary, int64 [D], ascending."""
        if "d2t" not in self._state:
            return torch.arange(self._head.target.vocab_size)
        return torch.arange(len(self._state["d2t"])) + self._state["d2t"]

    def kept_ids(self, how: str) -> Tensor | None:
        """The ids that the new draft vocabulary must contain; None if it is replaced.

        `how`: keep, extend or remap. Raises UserError if the sizes do not allow that.
        """
        if how == "remap":
            return None
        size, earlier = self._head.draft_size, len(self.ids)
        if earlier > size or (how == "keep" and earlier < size):
            raise UserError(
                f"option head.options.draft_vocab_size: the head has {size} tokens, that of head.init_from "
                f"{self._info.folder} {earlier}; make them equal, or set head.init_vocabulary to extend or remap"
            )
        return self.ids

    @torch.no_grad()
    def copy_into_head(self) -> None:
        """Copy the weights; of output layers, the rows of tokens that are in both vocabularies."""
        target, ids = self._head.target, self._head.draft_ids()
        row_of = torch.full((target.vocab_size,), -1)  # [V]
        row_of[self.ids] = torch.arange(len(self.ids))
        rows = row_of if ids is None else row_of[ids.cpu()]  # [D]: row of each token in the earlier head, or -1
        for name, tensor in self._head.state_dict().items():
            if name.startswith(_OUTPUT):
                tensor[rows.to(tensor.device) >= 0] = self._state[name][rows[rows >= 0]].to(tensor)
            elif name not in _MAPS:
                tensor.copy_(self._state[name])

    def _check_options(self, options: Sequence[str]) -> None:
        for option in options:
            before, now = getattr(self._config, option), getattr(self._head.config, option)
            if before != now:
                raise self._misfit(f"it has head.options.{option} {before}, not {now}")

    def _misfit(self, why: str) -> UserError:
        return UserError(f"option head.init_from: {self._info.folder} does not fit head.options: {why}")
