"""A head as another program reads it from its own files, with this project's names of options and tensors.

Imports build a head from it, and `reference_forward` computes drafts from it without one.

Legend: V target vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats.files import shorten
from spechead.heads import HEADS, Head
from spechead.heads.base import Role, options_with
from spechead.target.loading import dtype_name
from spechead.target.model import Target

_SAMPLED = 256  # tokens, to see whether the target scales its embeddings


@dataclass
class ForeignHead:
    """A head as a server would load it from a folder."""

    kind: str  # of HEADS
    config: dict[str, Any]  # the options of such a head that the files determine
    tensors: dict[str, Tensor]  # by the head's own names
    embedding: Tensor | None = None  # [V, H] of the files; None: the target's rows as they are stored

    def head(self, target: Target) -> Head:
        """Build the head in float32. Raises UserError if settings and tensors do not match."""
        self._refuse_more_parts_than_tensors()
        kind = HEADS[self.kind]
        sizes = copy.deepcopy({name: value for name, value in self.config.items() if name != "rope_scaling"})
        with torch.device("meta"):  # sizes in the settings may exceed the memory
            expected = kind(kind.Config(**sizes), target).state_dict()
        if wrong := _mismatches(self.tensors, expected):
            raise UserError(f"tensors do not make this {self.kind} head: {'; '.join(wrong)}")
        if self.embedding is not None and not _same(self.embedding, embedding_table(target)):
            raise UserError("embed_tokens.weight differs from the target's embeddings, which heads here use")
        head = kind(kind.Config(**self.config), target)
        head.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in self.tensors.items()})
        return head.eval().requires_grad_(False)

    def _refuse_more_parts_than_tensors(self) -> None:
        """Refuse more layers or stacks than there are tensors before any is built."""
        counts = {name: self.config[name] for name in options_with(HEADS[self.kind].Config, Role.COUNT)}
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise UserError(f"{name} is {shorten(count)}, and must be a whole number above 0")
        if math.prod(counts.values()) > len(self.tensors):
            wanted = ", ".join(f"{name} {shorten(count)}" for name, count in counts.items())
            raise UserError(f"the settings require {wanted}, and the files contain {len(self.tensors)} tensors")


def _mismatches(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """How tensors differ from the expected ones in name, shape or kind of number, and which are not finite."""
    both = sorted(expected.keys() & tensors.keys())
    wrong = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [f"unknown {name}" for name in sorted(tensors.keys() - expected.keys())]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, not {list(expected[name].shape)}"
        for name in both
        if expected[name].shape != tensors[name].shape
    ]
    wrong += [
        f"{name} is {dtype_name(tensors[name].dtype)}"
        for name in both
        if expected[name].is_floating_point() != tensors[name].is_floating_point()
    ]
    return wrong + [f"{name} has NaN or infinity" for name, tensor in sorted(tensors.items()) if not _finite(tensor)]


def stored_embedding(target: Target) -> Tensor:
    """The rows [V, H] of the target's embedding as its files store them."""
    weight: Tensor = target.model.get_input_embeddings().weight
    return weight


def embedding_table(target: Target) -> Tensor:
    """The embedding [V, H] that the target computes for each token; some families scale the stored rows."""
    return target.embed(torch.arange(target.vocab_size, device=target.device))


def own_embedding(target: Target) -> Tensor | None:
    """The rows [V, H] that a head's files need because the target scales its stored ones; None if it does not."""
    some = torch.arange(min(target.vocab_size, _SAMPLED), device=target.device)
    if torch.equal(target.embed(some), stored_embedding(target)[some]):
        return None
    return embedding_table(target)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _same(rows: Tensor, expected: Tensor) -> bool:
    """Whether rows are equal up to the rounding of their dtype."""
    alike = rows.is_floating_point() and rows.shape == expected.shape
    return alike and torch.equal(rows.to("cpu"), expected.to("cpu", rows.dtype))
