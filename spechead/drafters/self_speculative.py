"""The target drafts for itself with some of its layers left out (Draft & Verify, arXiv 2309.08168).

Keeping the first layers alone is drafting by early exit (LayerSkip, arXiv 2404.16710). Weights are shared with the
target; the drafts have a cache of their own. Knows nothing of how a draft is verified.

Legend: P prompt tokens, A tokens the target wrote behind them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spechead.drafters.draft_model import DraftModel
from spechead.errors import UserError
from spechead.generate import generate
from spechead.log import Progress
from spechead.target import Target


class SelfSpeculative(DraftModel):
    """A draft model that is the target's own decoder layers `layers` (from 0), without a second copy of weights.

    Take it after the target is packed, if it is to be. Raises UserError where the target has no such layers.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        super().__init__(target, target.subset(layers))


@dataclass
class Kept:
    """Decoder layers to draft with, and how far they may be trusted."""

    layers: list[int]
    agreement: float  # share of the searched texts' tokens that these layers would have drafted right


def search_layers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    skip: int,
    *,
    max_new_tokens: int = 64,
    quiet: bool = False,
) -> Kept:
    """Which layers to keep when `skip` of them are left out, found on a few prompts (token ids).

    Leaves out one layer after the other, each time the one without which the others agree best with the text that the
    target writes by itself (greedy, every token given the true ones before it); of equals the one that gives that text
    the higher probability, then the later. Runs the target's layers some skip * n_layers times over the texts. The
    same input gives the same answer.
    """
    if not 0 <= skip < target.n_layers:
        raise UserError(f"skip {skip} is not from 0 to {target.n_layers - 1}: target {target.name!r} must keep a layer")
    if not prompts:
        raise UserError("a search for layers to leave out needs at least one prompt")
    texts = [(list(prompt), generate(target, prompt, max_new_tokens=max_new_tokens).tokens) for prompt in prompts]
    kept, best = list(range(target.n_layers)), (1.0, 0.0)
    rounds = sum(target.n_layers - left for left in range(skip))
    with Progress("search for layers to leave out", rounds, "trial", quiet=quiet) as progress:
        for _ in range(skip):
            best = (-1.0, 0.0)
            for layer in reversed(kept):
                score = _agreement(target.subset([other for other in kept if other != layer]), texts)
                if score > best:
                    best, worst = score, layer
                progress.advance(note=f"agreement {best[0]:.3f}")
            kept.remove(worst)
    return Kept(kept, best[0])


@torch.no_grad()
def _agreement(model: Target, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Share of the answers' tokens that are the model's best choice, and their mean log-probability."""
    right = total = 0
    logp = 0.0
    for prompt, answer in texts:
        ids = torch.tensor([prompt + answer[:-1]], device=model.device)  # [1, P+A-1]
        hidden = model.forward(ids).hidden[0, len(prompt) - 1 :]  # [A, H]
        chosen: Tensor = model.logits(hidden).log_softmax(-1)  # [A, V]
        wanted = torch.tensor(answer, device=model.device)  # [A]
        right += int((chosen.argmax(-1) == wanted).sum())
        logp += float(chosen.gather(-1, wanted[:, None]).sum())
        total += len(answer)
    return right / total, logp / total
