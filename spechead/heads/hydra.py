"""Hydra (arXiv 2402.05109): heads on the target's last hidden state that also read the drafts before their own.

Head k, from 0, reads the state of row t beside the embeddings of k + 1 tokens; `ahead` tells which:

    head    reads                              predicts
    0       h_t  x_t+1                         x_t+2       x_t+1 is the target's own token, the root of the tree
    1       h_t  x_t+1  x_t+2                  x_t+3       in drafting x_t+2 is a draft: one that head 0 proposed
    k       h_t  x_t+1  ...  x_t+1+k           x_t+2+k

Hydra++ of the same paper is four blocks a head, `prefix`, `loss: soft_ce` and dropout.

Legend: B batch, T rows, K heads, H hidden size, D draft vocabulary, n positions or nodes, S rows remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spechead.data.dataset import Batch
from spechead.decoding.grow import grow
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import Plan, Tree
from spechead.heads.attention import CachedAttention, UnrolledAttention, causal_after
from spechead.heads.base import StepLoss, ahead, noise_of
from spechead.heads.decoder_shape import DecoderShape, start_near_identity
from spechead.heads.draft_loss import DraftLoss
from spechead.heads.losses import loss_named
from spechead.heads.residual import Block, ResidualHead
from spechead.options import Range
from spechead.target.cache import KVBuffer
from spechead.target.model import Target, TargetOutput

Drop = Callable[[Tensor], Tensor]
"""Dropout, or what does nothing."""


@dataclass
class HydraConfig(DecoderShape):
    """Shape and loss of the heads; the shape of a decoder layer is that of the prefix layer."""

    n_heads: Annotated[int, Range(1)] = 4
    """Heads, one behind the other; also the deepest draft."""
    n_layers: Annotated[int, Range(1)] = 1
    """Residual blocks of each head."""
    prefix: bool = False
    """A decoder layer over the target's hidden states, whose output the heads read in their place."""
    norm_embeddings: bool = True
    """Bring each embedding to a root mean square of 1: in many targets they are far smaller than hidden states, and the
    heads are slow to heed them. The paper does not."""
    loss: str = "hard_ce"
    """`hard_ce`: against the text's token; `soft_ce`: against the target's distribution over the draft vocabulary; or
    another of losses.LOSSES."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Share of what each block and output layer reads that is zeroed in training."""
    output: str = "own"
    """`own`: each head trains its output layer; `shared`: the target's, frozen, no weight of its own."""
    draft_vocab_size: Annotated[int, Range(0)] = 0
    """Rows of the output layer (the most frequent supervised tokens); 0 is the target's whole vocabulary."""
    decay: Annotated[float, Range(0)] = 1.0
    """Head k's loss weighs decay^k."""


class _Stack(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, inputs: int, size: int, n_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inputs if i == 0 else size, size) for i in range(n_layers))

    def forward(self, x: Tensor, drop: Drop) -> Tensor:  # [..., inputs] -> [..., H]
        for block in self.blocks:
            x = block(drop(x))
        return drop(x)


class Hydra(ResidualHead):
    """K residual stacks, each over a state and the tokens behind it, each with an output layer."""

    kind = "hydra"
    Config = HydraConfig

    def __init__(self, config: HydraConfig, target: Target) -> None:
        loss_named(config.loss)
        config.fill(target)
        super().__init__(config, target)
        size = config.hidden_size
        self.prefix = config.decoder_layer(target) if config.prefix else None
        self.heads = nn.ModuleList(_Stack((k + 2) * size, size, config.n_layers) for k in range(config.n_heads))
        self.add_outputs()

    @torch.no_grad()
    def init_from_target(self) -> None:
        super().init_from_target()
        if self.prefix is not None:
            start_near_identity(self.prefix, self.target)

    def head_logits(self, inputs: Tensor, k: int) -> Tensor:  # [..., (k+2)*H] -> [..., D]
        return self.output(self.heads[k](inputs, lambda x: x), k)

    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """Σ_k decay^k loss of head k, which reads the text's own tokens.

        It runs over the rows whose token ahead(2 + k) is supervised and in the draft vocabulary.
        """
        judge = DraftLoss(self, batch, out, loss_named(self.config.loss))
        hidden = out.hidden.to(self.dtype)  # [B, T, H]
        if self.prefix is not None:
            hidden = self.prefix(hidden, batch.positions, UnrolledAttention(batch.document))
        drop = _Dropout(self.config.dropout if self.training else 0.0, batch)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for k in range(self.config.n_heads):
            rows = judge.rows[k]  # [B, T]
            tokens = [ahead(batch, 1 + i)[0][rows] for i in range(k + 1)]  # each [n]
            inputs = torch.cat([hidden[rows], *map(self._embed, tokens)], -1)  # [n, (k+2)*H]
            states = self.heads[k](inputs, drop)  # [n, H]
            loss = loss + self.config.decay**k * judge.loss(k, states, partial(self.output, k=k))
        return StepLoss(loss, judge.hits)

    def new_state(self, prompt: Tensor) -> KVBuffer | None:
        """Keys and values of the prefix layer for the rows of the text so far, made from the target's true states."""
        return None if self.prefix is None else KVBuffer()

    @torch.no_grad()
    def propose(
        self, state: KVBuffer | None, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """Take in the rows before `fresh` and grow a tree behind the last; each node is drafted from its own path."""
        size = self.config.hidden_size
        level = torch.cat([self._last(state, out), self._embed(fresh[-1:])], -1)  # [n, (k+2)*H] read last, at a depth
        begin = -1  # number of the first of these rows; the root's is -1

        def deepen(tokens: Tensor, parents: Tensor, _: Tensor) -> Tensor:
            nonlocal level, begin
            above = level[parents - begin]
            begin += level.shape[0]
            level = torch.cat([above, self._embed(tokens)], -1)
            return self._log_probabilities(level, level.shape[-1] // size - 2)

        first = self._log_probabilities(level, 0)  # [1, D]
        plan = plan.limited(self.depths)
        return grow(plan, fresh[-1], first, self.draft_ids(), deepen, drawing, self.target.vocab_size)

    def _last(self, state: KVBuffer | None, out: TargetOutput) -> Tensor:
        """What the heads read of the last of the target's new rows: [1, H]. No draft enters the state."""
        if self.prefix is None or state is None:
            return out.hidden[0, -1:].to(self.dtype)
        hidden = out.hidden.to(self.dtype)  # [1, n, H]
        past, new = state.length, hidden.shape[1]
        positions = torch.arange(past, past + new, device=hidden.device)[None]
        attend = CachedAttention(state, causal_after(past, new, hidden.device))
        return self.prefix(hidden, positions, attend)[0, -1:]

    def _log_probabilities(self, inputs: Tensor, k: int) -> Tensor:  # [n, (k+2)*H] -> [n, D]
        return self.head_logits(inputs, k).float().log_softmax(-1)

    def _embed(self, ids: Tensor) -> Tensor:  # [n] -> [n, H]
        embedded = self.target.embed(ids).float()
        if self.config.norm_embeddings:
            embedded = F.rms_norm(embedded, embedded.shape[-1:], eps=self.config.rms_norm_eps)
        return embedded.to(self.dtype)


class _Dropout:
    """Zeroes a share of its inputs and makes up for it in the rest."""

    def __init__(self, share: float, batch: Batch) -> None:
        self._share = share
        if share:
            self._generator = noise_of(batch, batch.ids.device)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._share:
            return x
        kept = torch.rand(x.shape, generator=self._generator, device=x.device) >= self._share
        return x * kept / (1 - self._share)
