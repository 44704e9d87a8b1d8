"""What every trained head shares: configuration, draft vocabulary, and the one function that aligns rows and labels.

A head is a drafter that is trained. Knows nothing of optimizers, files or templates.

Legend: B batch rows, T tokens, D draft vocabulary, V target vocabulary, H hidden size, K depths.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Tree, chain
from spechead.errors import UserError
from spechead.options import check_ranges
from spechead.target.model import Target, TargetOutput
from spechead.target.packed_linear import PackedLinear

_SPREAD = 2654435761  # prime, near 2^32 by the golden ratio: neighbouring numbers lie far apart


@dataclass
class Hits:
    """Which drafts would have been accepted, had decoding started a pass at each row (the text is the target's own)."""

    correct: Tensor  # bool [K, B, T]: the draft of depth k+1 started at row t is the text's token t+2+k
    supervised: Tensor  # bool [K, B, T]: that token exists in the same document and is supervised


@dataclass
class StepLoss:
    """What a head's training step returns."""

    loss: Tensor  # float [], summed over supervised positions
    hits: Hits


def ahead(batch: Batch, n: int) -> tuple[Tensor, Tensor]:
    """Tokens n places further on, and where they are supervised: ids [B, T] and bool [B, T].

    The one place where rows and labels are aligned. Row t holds the target's state at token t:

        row            0    1    2    3    4
        token          x0   x1   x2   x3   x4
        ahead(1)       x1   x2   x3   x4   -     the target's own prediction; what EAGLE embeds beside feature t
        ahead(2)       x2   x3   x4   -    -     label of Medusa head 0, and of EAGLE's first draft
        ahead(2 + k)   ...                       label of Medusa head k, and of EAGLE's draft of depth k + 1

    A row counts exactly when the token it is to predict is an assistant's and lies in the same document; the
    supervision is shifted with the tokens.
    """
    width = batch.ids.shape[1]
    ids = nn.functional.pad(batch.ids, (0, n))[:, n:][:, :width]
    supervised = nn.functional.pad(batch.supervised, (0, n))[:, n:][:, :width]
    document = nn.functional.pad(batch.document, (0, n), value=-1)[:, n:][:, :width]
    return ids, supervised & (document == batch.document) & (batch.document >= 0)


def noise_of(batch: Batch, device: torch.device) -> torch.Generator:
    """Random numbers for what a training step disturbs.

    A call takes one number from the run's random state, whatever the batch: so all ranks keep the same state, the one
    that checkpoints hold. What tells their noise apart is the first conversation of each batch.
    """
    seed = int(torch.randint(1 << 32, ())) ^ batch.rows[0] * _SPREAD % (1 << 32)  # the CPU reads 32 bits of a seed
    return torch.Generator(device).manual_seed(seed)


def targets_size(size: int, target: Target) -> int:
    """The target's hidden size, which is a head's, too. Raises UserError for another one than that or 0."""
    if size not in (0, target.hidden_size):
        raise UserError(f"head.options.hidden_size {size} differs from the target's {target.hidden_size}")
    return target.hidden_size


class Head(nn.Module, ABC):
    """Base of all heads. A subclass adds `Config`, the modules, `training_step`, `new_state` and `propose`."""

    kind: ClassVar[str]
    Config: ClassVar[type]

    taps: Sequence[int]  # the target's hidden states it reads, as indices into `hidden_states`
    tree: Plan  # drafted unless another is asked for
    branches = True
    depths: int  # drafts that it is trained to make, one behind the other
    recompute: bool | None = None  # whether training computes decoder steps twice, to keep less; None: it has none

    def __init__(self, config: Any, target: Target) -> None:
        super().__init__()
        check_ranges(config, "head.options.")
        self.config = config
        self.target = target  # not a module: stays out of the parameters and of the saved file
        self.tree = chain(3)
        if 0 < config.draft_vocab_size < target.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(target.vocab_size, dtype=torch.bool))
        self._maps: tuple[Tensor, Tensor] | None = None  # see `_both_ways`

    d2t: Tensor  # int64 [D]: target id = draft id + d2t[draft id]
    t2d: Tensor  # bool [V]: whether a target id is in the draft vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """In which the head computes; drafting may be coarser than the target."""
        packed = (module.packed for module in self.modules() if isinstance(module, PackedLinear))
        return next(itertools.chain(self.parameters(), packed)).dtype

    @property
    def scored_depth(self) -> int:
        """How many drafts, one behind the other, a `training_step` judges now."""
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
        self._maps = None  # a loaded vocabulary takes the place of one that was counted

    def draft_ids(self) -> Tensor | None:
        """The target id of each draft id, int64 [D], one tensor for all calls; None where they are the same."""
        return self._both_ways()[0] if self.reduced else None

    def to_draft(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids of target ids, and whether each has one: two tensors of the shape of `ids`."""
        if not self.reduced:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        return self._both_ways()[1][ids], self.t2d[ids]

    def _both_ways(self) -> tuple[Tensor, Tensor]:
        """Of a reduced vocabulary the target id of each draft id [D], and the draft id of each target id [V].

        Made once, and again for another device; of a target id that is not in, the draft id means nothing.
        """
        if self._maps is None or self._maps[0].device != self.d2t.device:
            ids = torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t
            self._maps = ids, (self.t2d.cumsum(0) - 1).clamp(min=0)
        return self._maps

    def target_logits(self, state: Tensor) -> Tensor:
        """What the target's output layer says of states [..., H], with a gradient where one is asked: [..., D]."""
        if not torch.is_grad_enabled():
            layer = self.target.output_layer(self.draft_ids(), state.dtype)
            return self.target.scaled(layer(state).float())
        weight, bias = self.target.output_rows(self.draft_ids())
        logits = nn.functional.linear(state, weight.to(state.dtype), None if bias is None else bias.to(state.dtype))
        return self.target.scaled(logits.float())

    def init_from_target(self) -> None:
        """Start from the target's weights where that helps; the target must not be packed yet."""

    @abstractmethod
    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """The loss of a batch, given the target's hidden states, and which drafts would have been accepted."""

    @abstractmethod
    def new_state(self, prompt: Tensor) -> Any:
        """See `drafters.base.Drafter`."""

    @abstractmethod
    def propose(self, state: Any, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None) -> Tree:
        """See `drafters.base.Drafter`."""
