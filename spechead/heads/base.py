"""The base class of trained heads: options and their roles, draft vocabulary, and the alignment of rows and labels.

A head is a drafter with weights of its own.

Legend: B batch, T rows, D draft vocabulary, V target vocabulary, H hidden size, K depths.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Tree, chain
from spechead.errors import UserError
from spechead.options import check_ranges
from spechead.target.model import Target, TargetOutput
from spechead.target.packed_linear import PackedLinear

_SPREAD = 2654435761  # prime near 2^32 / golden ratio: multiples of neighbouring numbers lie far apart


class Role(Enum):
    """What an option of a head affects, stated in its annotation: `n_layers: Annotated[int, Range(1), Role.COUNT] = 1`.

    Export, import and head.init_from go by the roles, so that they need no list of heads or options.
    """

    TRAINING = auto()  # training alone: an export is complete without it
    SIZE = auto()  # a size, epsilon or rotary base, which every format can express
    COUNT = auto()  # how many layers or stacks there are, each with at least one tensor
    TENSORS = auto()  # which tensors there are
    MEANING = auto()  # what the tensors mean, in a way that neither their names nor their shapes show


def options_with(config: type, *roles: Role) -> list[str]:
    """The options of a head's `Config` that have one of the roles, in the order of its fields."""
    hints = get_type_hints(config, include_extras=True)
    return [f.name for f in fields(config) if {*roles} & {*getattr(hints[f.name], "__metadata__", ())}]


@dataclass
class Hits:
    """Which drafts would have been accepted if a decoding pass had started at each row of the target's own text."""

    correct: Tensor  # bool [K, B, T]: the draft of depth k+1 that starts at row t is token t+2+k
    supervised: Tensor  # bool [K, B, T]: that token exists in the same document and is supervised


@dataclass
class StepLoss:
    """What a head's training step returns."""

    loss: Tensor  # float [], summed over supervised positions
    hits: Hits


def ahead(batch: Batch, n: int) -> tuple[Tensor, Tensor]:
    """Tokens n positions later, and where they are supervised: ids [B, T] and bool [B, T].

    The only place where rows and labels are aligned. Row t has the target's hidden state of token t:

        row            0    1    2    3    4
        token          x0   x1   x2   x3   x4
        ahead(1)       x1   x2   x3   x4   -     the target's own prediction; EAGLE embeds it along with feature t
        ahead(2)       x2   x3   x4   -    -     label of Medusa head 0, and of EAGLE's first draft
        ahead(2 + k)   ...                       label of Medusa head k, and of EAGLE's draft of depth k + 1

    A row counts if the token to predict is an assistant's and lies in the same document: supervision is shifted along
    with the tokens.
    """
    width = batch.ids.shape[1]
    ids = nn.functional.pad(batch.ids, (0, n))[:, n:][:, :width]
    supervised = nn.functional.pad(batch.supervised, (0, n))[:, n:][:, :width]
    document = nn.functional.pad(batch.document, (0, n), value=-1)[:, n:][:, :width]
    return ids, supervised & (document == batch.document) & (batch.document >= 0)


def noise_generator(batch: Batch, device: torch.device) -> torch.Generator:
    """Random numbers for noise or dropout in one training step.

    Each call takes one number from the global random state, whatever the batch, so that all ranks keep the same state,
    which checkpoints store. The first conversation of the batch makes the noise of each rank different.
    """
    seed = int(torch.randint(1 << 32, ())) ^ batch.rows[0] * _SPREAD % (1 << 32)  # the CPU reads 32 bits of a seed
    return torch.Generator(device).manual_seed(seed)


def same_hidden_size(size: int, target: Target) -> int:
    """The target's hidden size. Raises UserError unless `size` is equal to it, or 0."""
    if size not in (0, target.hidden_size):
        raise UserError(f"option head.options.hidden_size: must be 0 or the target's {target.hidden_size}, got {size}")
    return target.hidden_size


class Head(nn.Module, ABC):
    """Base of all heads. A subclass adds `Config`, the modules, `training_step`, `new_state` and `propose`."""

    kind: ClassVar[str]  # its name in HEADS and in files
    title: ClassVar[str]  # as papers write it, for model cards
    Config: ClassVar[type]  # dataclass of options, each with its `Role`

    taps: Sequence[int]  # tapped layers of the target, as indices into `hidden_states`
    tree: Plan  # the tree it drafts by default
    branches = True
    depths: int  # draft tokens along one path that it is trained for
    recompute: bool | None = None  # gradient checkpointing of decoder steps; None: the head has none

    def __init__(self, config: Any, target: Target) -> None:
        super().__init__()
        check_ranges(config, "head.options.")
        self.config = config
        self.target = target  # not a module: stays out of the parameters and the saved file
        self.tree = chain(3)
        if 0 < config.draft_vocab_size < target.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(target.vocab_size, dtype=torch.bool))
        self._maps: tuple[Tensor, Tensor] | None = None  # see `_vocabulary_maps`

    d2t: Tensor  # int64 [D]: target id = draft id + d2t[draft id]
    t2d: Tensor  # bool [V]: whether a target id is in the draft vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the head computes in; in drafting it may be coarser than the target's."""
        packed = (module.packed for module in self.modules() if isinstance(module, PackedLinear))
        return next(itertools.chain(self.parameters(), packed)).dtype

    @property
    def scored_depth(self) -> int:
        """The depth up to which `training_step` compares drafts with the text."""
        return self.depths

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return "d2t" in self._buffers

    @property
    def draft_size(self) -> int:
        return self.d2t.shape[0] if self.reduced else self.target.vocab_size

    def set_vocabulary(self, ids: Tensor) -> None:
        """Fix the draft vocabulary: sorted target ids [D]."""
        self.d2t.copy_(ids - torch.arange(ids.shape[0], device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        self._maps = None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._maps = None  # a loaded vocabulary replaces the one set before

    def draft_ids(self) -> Tensor | None:
        """The target id of each draft id, int64 [D], the same tensor in all calls; None if the ids are the same."""
        return self._vocabulary_maps()[0] if self.reduced else None

    def to_draft(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids of target ids, and whether each has one: two tensors of the shape of `ids`."""
        if not self.reduced:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        return self._vocabulary_maps()[1][ids], self.t2d[ids]

    def _vocabulary_maps(self) -> tuple[Tensor, Tensor]:
        """The target id of each draft id [D] and the draft id of each target id [V] of a reduced vocabulary.

        Computed once for each device. The draft id of a target id outside the vocabulary is meaningless.
        """
        if self._maps is None or self._maps[0].device != self.d2t.device:
            ids = torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t
            self._maps = ids, (self.t2d.cumsum(0) - 1).clamp(min=0)
        return self._maps

    def target_logits(self, state: Tensor) -> Tensor:
        """Logits of the target's output layer over the draft vocabulary, differentiable: [..., H] -> [..., D]."""
        if not torch.is_grad_enabled():
            layer = self.target.output_layer(self.draft_ids(), state.dtype)
            return self.target.scaled(layer(state).float())
        weight, bias = self.target.output_rows(self.draft_ids())
        logits = nn.functional.linear(state, weight.to(state.dtype), None if bias is None else bias.to(state.dtype))
        return self.target.scaled(logits.float())

    def init_from_target(self) -> None:
        """Initialise from the target's weights where that helps; the target must not be packed yet."""

    @abstractmethod
    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """The loss of a batch, given the target's hidden states, and which drafts would have been accepted."""

    @abstractmethod
    def new_state(self, prompt: Tensor) -> Any:
        """See `drafters.base.Drafter`."""

    @abstractmethod
    def propose(self, state: Any, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None) -> Tree:
        """See `drafters.base.Drafter`."""
