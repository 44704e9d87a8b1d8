"""Hydra (arXiv 2402.05109): heads on the target's last hidden state that also read the drafts of earlier heads.

Head k reads the state of row t along with the embeddings of the next k + 1 tokens, aligned by `ahead`:

    head    reads                              predicts
    0       h_t  x_t+1                         x_t+2       x_t+1 is the target's own token, the root of the tree
    1       h_t  x_t+1  x_t+2                  x_t+3       in drafting, x_t+2 is a draft of head 0
    k       h_t  x_t+1  ...  x_t+1+k           x_t+2+k

Hydra++ of the same paper has four blocks in each head, `prefix`, `loss: soft_ce` and dropout.

Legend: B batch, T rows, K heads, H hidden size, D draft vocabulary, n positions or nodes.
"""

from __future__ import annotations

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
from spechead.heads.base import Role, StepLoss, ahead, noise_generator
from spechead.heads.decoder_shape import DecoderShape, start_near_identity
from spechead.heads.draft_loss import DraftLoss
from spechead.heads.losses import loss_named
from spechead.heads.residual import Block, ResidualHead
from spechead.options import Range
from spechead.target.cache import KVBuffer
from spechead.target.model import Target, TargetOutput


@dataclass
class HydraConfig(DecoderShape):
    """Shape and loss of the heads; the decoder layer's shape is that of the prefix layer."""

    n_heads: Annotated[int, Range(1), Role.COUNT] = 4
    """Heads in sequence, and so the deepest draft."""
    n_layers: Annotated[int, Range(1), Role.COUNT] = 1
    """Residual blocks of each head."""
    prefix: Annotated[bool, Role.TENSORS] = False
    """A decoder layer over the target's hidden states, whose output the heads read instead of them."""
    norm_embeddings: Annotated[bool, Role.MEANING] = True
    """Scale each embedding to a root mean square of 1: in many targets embeddings are far smaller than hidden states,
    and the heads are slow to use them. Not in the paper."""
    loss: Annotated[str, Role.TRAINING] = "hard_ce"
    """`hard_ce`: against the text's token; `soft_ce`: against the target's distribution over the draft vocabulary; or
    another of losses.LOSSES."""
    dropout: Annotated[float, Range(0, below=1), Role.TRAINING] = 0.0
    """Share of the inputs of each block and output layer that is zeroed in training."""
    output: Annotated[str, Role.TENSORS] = "own"
    """`own`: each head trains an output layer; `shared`: the target's, frozen, without weights of its own."""
    draft_vocab_size: Annotated[int, Range(0), Role.SIZE] = 0
    """Rows of the output layer (the most frequent supervised tokens); 0 is the target's whole vocabulary."""
    decay: Annotated[float, Range(0), Role.TRAINING] = 1.0
    """The weight of head k's loss is decay^k."""


class _Stack(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, inputs: int, size: int, n_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inputs if i == 0 else size, size) for i in range(n_layers))

    def forward(self, x: Tensor, dropout: _Dropout | None = None) -> Tensor:  # [..., inputs] -> [..., H]
        for block in self.blocks:
            x = block(dropout(x) if dropout else x)
        return dropout(x) if dropout else x


class Hydra(ResidualHead):
    """K residual stacks, each over a hidden state and the tokens after it, each with an output layer."""

    kind = "hydra"
    title = "Hydra"
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
        return self.output(self.heads[k](inputs), k)

    def training_step(self, batch: Batch, out: TargetOutput) -> StepLoss:
        """Σ_k decay^k loss of head k, which reads the text's own tokens.

        Over rows whose label ahead(2 + k) is supervised and can be drafted.
        """
        draft_loss = DraftLoss(self, batch, out, loss_named(self.config.loss))
        hidden = out.hidden.to(self.dtype)  # [B, T, H]
        if self.prefix is not None:
            hidden = self.prefix(hidden, batch.positions, UnrolledAttention(batch.document))
        dropout = _Dropout(self.config.dropout, batch) if self.training and self.config.dropout else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for k in range(self.config.n_heads):
            rows = draft_loss.rows[k]  # [B, T]
            tokens = [ahead(batch, 1 + i)[0][rows] for i in range(k + 1)]  # each [n]
            inputs = torch.cat([hidden[rows], *map(self._embed, tokens)], -1)  # [n, (k+2)*H]
            states = self.heads[k](inputs, dropout)  # [n, H]
            loss = loss + self.config.decay**k * draft_loss.loss(k, states, partial(self.output, k=k))
        return StepLoss(loss, draft_loss.hits)

    def new_state(self, prompt: Tensor) -> KVBuffer | None:
        """Keys and values of the prefix layer for the committed rows, from the target's true hidden states."""
        return None if self.prefix is None else KVBuffer()

    @torch.no_grad()
    def propose(
        self, state: KVBuffer | None, fresh: Tensor, out: TargetOutput, plan: Plan, drawing: Drawing | None = None
    ) -> Tree:
        """Commit the new rows and grow a tree from the last of them; each node is drafted from its own path."""
        size = self.config.hidden_size
        level = torch.cat([self._last_state(state, out), self._embed(fresh[-1:])], -1)  # [n, (k+2)*H] of one depth
        begin = -1  # number of its first row; the root's is -1

        def deepen(tokens: Tensor, parents: Tensor, _: Tensor) -> Tensor:
            nonlocal level, begin
            paths = level[parents - begin]
            begin += level.shape[0]
            level = torch.cat([paths, self._embed(tokens)], -1)
            return self._log_probabilities(level, level.shape[-1] // size - 2)

        first = self._log_probabilities(level, 0)  # [1, D]
        plan = plan.limited(self.depths)
        return grow(plan, fresh[-1], first, self.draft_ids(), deepen, drawing, self.target.vocab_size)

    def _last_state(self, state: KVBuffer | None, out: TargetOutput) -> Tensor:
        """The state [1, H] that the heads read at the last committed row. No draft enters the cache."""
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
        embeddings = self.target.embed(ids).float()
        if self.config.norm_embeddings:
            embeddings = F.rms_norm(embeddings, embeddings.shape[-1:], eps=self.config.rms_norm_eps)
        return embeddings.to(self.dtype)


class _Dropout:
    """Dropout with the random numbers of one training step."""

    def __init__(self, share: float, batch: Batch) -> None:
        self._share, self._generator = share, noise_generator(batch, batch.ids.device)

    def __call__(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape, generator=self._generator, device=x.device) >= self._share
        return x * kept / (1 - self._share)
