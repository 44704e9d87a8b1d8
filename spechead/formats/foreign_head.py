"""A head as another program sees it: read from that program's files, in this project's names.

What importing makes a head of, and what `forward` computes from without a head. Knows nothing of files.

Legend: V target vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spechead.errors import UserError
from spechead.formats.files import as_text
from spechead.heads import HEADS, Head
from spechead.target.model import Target

_PARTS = {"eagle": ("n_layers",), "eagle3": ("n_layers",), "medusa": ("n_heads", "n_layers")}
"""Options that say how many layers or blocks a head has; each brings a tensor at least."""
_SAMPLED = 256  # tokens that tell whether embeddings are scaled


@dataclass
class ForeignHead:
    """What a server would make of a folder."""

    kind: str  # of HEADS
    config: dict[str, Any]  # those options of such a head that the files decide
    tensors: dict[str, Tensor]  # under the head's own names
    embedding: Tensor | None = None  # [V, H] that it embeds tokens with; None: the target's rows as they are stored

    def head(self, target: Target) -> Head:
        """The head, in float32. Raises UserError where the files do not make one, tensor by tensor."""
        self._needs_parts()
        kind, theirs = HEADS[self.kind], self.tensors
        sizes = copy.deepcopy({name: value for name, value in self.config.items() if name != "rope_scaling"})
        with torch.device("meta"):  # what the settings ask for may be larger than the memory
            ours = kind(kind.Config(**sizes), target).state_dict()
        wrong = [f"missing {name}" for name in sorted(ours.keys() - theirs.keys())]
        wrong += [f"unknown {name}" for name in sorted(theirs.keys() - ours.keys())]
        wrong += [
            f"{name} is {list(theirs[name].shape)}, not {list(ours[name].shape)}"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name].shape != theirs[name].shape
        ]
        wrong += [
            f"{name} is {str(theirs[name].dtype)[6:]}"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name].is_floating_point() != theirs[name].is_floating_point()
        ]
        wrong += [f"{name} holds NaN or infinity" for name, tensor in sorted(theirs.items()) if not _finite(tensor)]
        if wrong:
            raise UserError(f"tensors do not make this {self.kind} head: {'; '.join(wrong)}")
        if self.embedding is not None and not _same(self.embedding, embedded(target)):
            raise UserError(
                "embed_tokens.weight differs from the target's embeddings; heads here embed with the target's own"
            )
        head = kind(kind.Config(**self.config), target)
        head.load_state_dict({name: tensor.to(ours[name].dtype) for name, tensor in theirs.items()})
        return head.eval().requires_grad_(False)

    def _needs_parts(self) -> None:
        """Refuse more layers than there are tensors, before they are made."""
        asked = {name: self.config[name] for name in _PARTS[self.kind]}
        for name, count in asked.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise UserError(f"{name} is {as_text(count)}, and must be a whole number above 0")
        if math.prod(asked.values()) > len(self.tensors):
            told = ", ".join(f"{name} {as_text(count)}" for name, count in asked.items())
            raise UserError(f"the settings ask for {told}, and the files hold {len(self.tensors)} tensors")


def stored_embedding(target: Target) -> Tensor:
    """The rows [V, H] of the target's embedding, as its files hold them."""
    weight: Tensor = target.model.get_input_embeddings().weight
    return weight


def embedded(target: Target) -> Tensor:
    """What the target makes of each token [V, H]; some families scale their rows."""
    return target.embed(torch.arange(target.vocab_size, device=target.device))


def own_embedding(target: Target) -> Tensor | None:
    """The rows [V, H] that a head must bring, since the target's stored ones are not what it embeds with; or None."""
    some = torch.arange(min(target.vocab_size, _SAMPLED), device=target.device)
    if torch.equal(target.embed(some), stored_embedding(target)[some]):
        return None
    return embedded(target)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _same(theirs: Tensor, ours: Tensor) -> bool:
    """Whether rows are equal, up to what the files' dtype rounds."""
    alike = theirs.is_floating_point() and theirs.shape == ours.shape
    return alike and torch.equal(theirs.to("cpu"), ours.to("cpu", theirs.dtype))
