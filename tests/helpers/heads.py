"""Small heads of every kind: make, train and compare them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from spechead.data.dataset import Batch, Sample, collate
from spechead.decoding.generate import generate
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Dynamic, Plan, Static, chain
from spechead.heads import HEADS, Head
from spechead.heads.base import StepLoss
from spechead.heads.unrolled import UnrolledHead
from spechead.target.model import Target
from tests.helpers.targets import make_target

OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {"steps": 4, "draft_vocab_size": 48, "topk_weight": 1.0, "noise": 0.0},
    "eagle3": {"steps": 4, "draft_vocab_size": 48},
    "hydra": {"n_heads": 4, "n_layers": 2, "prefix": True, "draft_vocab_size": 48},
    "medusa": {"n_heads": 4, "draft_vocab_size": 48},
}


SCALED = "llama-scaled"  # a target whose rotary positions are scaled


# Options that change what a head computes: (kind, family of the target, options)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle3.1": ("eagle3", "llama", {"fc_norm": True, "norm_output": True, "loss": "lk_lambda"}),
    "two-layers": ("eagle3", "llama", {"n_layers": 2, "norm_before_residual": True, "loss": "kl"}),
    "norm-before-fc": ("eagle3", "llama", {"norm_before_fc": True, "norm_output": True, "n_layers": 3, "loss": "tv"}),
    "whole-vocabulary": ("eagle3", "llama", {"draft_vocab_size": 0, "layers": [1, 3, 5, 7], "loss": "lk_alpha"}),
    "wide-heads": ("eagle3", "llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}),
    "eagle3-scaled": ("eagle3", SCALED, {"n_layers": 2, "loss": "hard_ce"}),
    "eagle-scaled": ("eagle", SCALED, {"n_layers": 2}),
    "hydra-scaled": ("hydra", SCALED, {"loss": "lk_alpha"}),
}


TREE = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


PLANS: list[Plan] = [chain(4), TREE, Dynamic(nodes=14, depth=4, topk=4)]


UNROLLED_VARIANTS = [name for name in VARIANTS if issubclass(HEADS[VARIANTS[name][0]], UnrolledHead)]


UNROLLED = [kind for kind, head in HEADS.items() if issubclass(head, UnrolledHead)]


def make_head(kind: str, target: Target, seed: int = 0, **options: Any) -> Head:
    torch.manual_seed(seed)
    config = HEADS[kind].Config(**{"draft_vocab_size": 48} | OPTIONS.get(kind, {}) | options)
    head = HEADS[kind](config, target)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size) * 2)  # every other token, so that the map matters
    head.init_from_target()
    return head


def draft_ids(head: Head) -> torch.Tensor:
    """The target ids of a reduced vocabulary."""
    ids = head.draft_ids()
    assert ids is not None
    return ids


def sample(target: Target, length: int = 20, seed: int = 3) -> Sample:
    """The target's own greedy text behind a prompt of eight tokens, the answer supervised."""
    prompt = torch.randint(3, target.vocab_size, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = prompt + generate(target, prompt, max_new_tokens=length).tokens
    return Sample(torch.tensor(ids), torch.arange(len(ids)) >= 8, 0)


def step(head: Head, batch: Batch) -> StepLoss:
    same = batch.document[:, :, None] == batch.document[:, None, :]
    out = head.target.forward(batch.ids, taps=head.taps, positions=batch.positions, visible=same.tril())
    return head.training_step(batch, out)


def fit(head: Head, batch: Batch, steps: int, lr: float = 1e-2) -> None:
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        loss = step(head, batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def trained(kind: str, target: Target, texts: list[Sample], steps: int = 40) -> Head:
    """A head fitted to a few texts."""
    head = make_head(kind, target)
    fit(head, collate(texts, 256), steps)
    return head.eval()


def one_row(supervised: list[int], document: list[int] | None = None) -> Batch:
    width = len(supervised)
    return Batch(
        torch.arange(10, 10 + width)[None],
        torch.tensor([supervised], dtype=torch.bool),
        torch.arange(width)[None],
        torch.tensor([document or [0] * width]),
        [0],
    )


@contextmanager
def kept_for_backward() -> Iterator[list[torch.Size]]:
    """The shapes of all tensors that a forward pass keeps."""
    shapes: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield shapes


def check_unrolled(head: Head, target: Target) -> None:
    """At step s and row t, training's logits are those of the s-th draft of a pass that starts behind row t."""
    assert isinstance(head, UnrolledHead)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    text = sample(target)
    batch = collate([text], 64)
    out = target.forward(batch.ids, taps=head.taps)
    unrolled = head.unroll(batch, head.start(out), head.config.steps)
    trained = [head._log_probabilities(hidden[0]) for hidden in unrolled]  # each [T, D]
    for row in (0, 3, 9, 15):
        state = head.new_state(text.ids)
        fresh = text.ids[1 : row + 2]
        drafted: list[torch.Tensor] = []
        original = head._log_probabilities

        def spy(
            h: torch.Tensor, seen: list[torch.Tensor] = drafted, real: Any = original, row: int = row
        ) -> torch.Tensor:
            seen.append(real(h)[0])
            forced = torch.full((1, head.draft_size), -50.0)  # draft the text's own next token, as training feeds it
            label = int(head.to_draft(text.ids[row + 1 + len(seen)])[0])
            forced[0, label] = 0.0
            return forced

        ids = text.ids
        inside = [bool(head.to_draft(ids[row + 2 + s])[1]) for s in range(head.config.steps)]
        head._log_probabilities = spy  # type: ignore[method-assign, assignment]
        try:
            head.propose(state, fresh, out.rows(torch.arange(row + 1)), chain(head.config.steps))
        finally:
            head._log_probabilities = original  # type: ignore[method-assign]
        for s, logp in enumerate(drafted):
            assert torch.allclose(logp, trained[s][row], atol=1e-5), (row, s)
            if not inside[s]:
                break  # a token outside the draft vocabulary cannot be drafted


LENGTHS = (9, 1, 17)


def prompts_of(target: Target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, target.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def by_hand(target: Target, prompt: list[int], sampler: Sampler, count: int) -> list[int]:
    """Greedy text without a cache: the processors on prompt and text so far, token by token."""
    ids = list(prompt)
    for _ in range(count):
        logits = target.logits(target.forward(torch.tensor([ids])).hidden[0, -1:])
        for processor in sampler._processors:
            logits = processor(torch.tensor([ids]), logits)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def learn(head: Head, batch: Batch, steps: int) -> None:
    """Learn a batch by heart, from small weights: this random target's own are a bad start for that."""
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    fit(head, batch, steps)


@cache
def overfitted(kind: str) -> tuple[Target, Head, list[list[int]]]:
    """A head that knows half of the tokens, trained on the greedy texts behind three prompts of unequal length."""
    target = make_target()
    prompts = prompts_of(target)
    head = make_head(kind, target)
    samples = []
    for prompt in prompts:
        ids = prompt + generate(target, prompt, max_new_tokens=24).tokens
        samples.append(Sample(torch.tensor(ids), torch.arange(len(ids)) >= len(prompt), 0))
    learn(head, collate(samples, 128), 60)
    return target, head, prompts
