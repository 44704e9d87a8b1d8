"""`spechead search-layers`: find the layers that a target may skip when it drafts for itself.

Legend: P prompt tokens, A tokens of the answer, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from torch import Tensor

from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.data.sources import parse, read_rows
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.files import shipped
from spechead.options import Range
from spechead.progress import Progress
from spechead.target.model import Target
from spechead.target.options import TargetOptions

SAMPLE_DATA = "data/sample.jsonl"


@dataclass(kw_only=True)
class SearchOptions(TargetOptions):
    """Find which layers a target may skip when it drafts for itself; standard output is a value for --drafter."""

    target: str = field()  # required, unlike in TargetName
    """Bundled target, local folder or hub id."""
    skip: int
    """Layers to skip."""
    prompts: str = ""
    """JSONL file of prompts to search on, {"question_id", "category", "turns"} per line; empty: those of the shipped
    sample data. Measure the result on other prompts, as eval does by default."""
    limit: Annotated[int, Range(1)] = 4
    """Prompts to use, spread over the categories; time grows with them."""
    max_new_tokens: Annotated[int, Range(1)] = 64
    """Tokens that the target writes after each prompt."""


@dataclass
class KeptLayers:
    """Decoder layers to draft with, and how often they agree with the whole target."""

    layers: list[int]
    agreement: float  # share of the answers' tokens that these layers alone would have chosen


def search(options: SearchOptions) -> KeptLayers:
    """Search, print the drafter to standard output, and its agreement to standard error."""
    prompts = balanced(read_prompts(Path(options.prompts)) if options.prompts else sample_prompts(), options.limit)
    notes = Console(stderr=True, highlight=False, markup=False)
    with notes.status("loading the target"):
        target = options.load()
    ids = [target.chat.prompt_ids([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    kept = search_layers(target, ids, options.skip, max_new_tokens=options.max_new_tokens)
    drafter = f"self:{ranges(kept.layers)}"
    print(drafter)
    notes.print(
        f"{len(kept.layers)} of {target.n_layers} layers kept; agreement {kept.agreement:.3f}: "
        "the share of the target's tokens that they alone would have chosen\n"
        f'try it: spechead generate --target {options.target} --drafter {drafter} --prompt "..."',
        soft_wrap=True,
    )
    return kept


def sample_prompts() -> list[Prompt]:
    """The first user message of each conversation of the shipped sample data."""
    prompts = []
    for number, row in enumerate(read_rows(str(shipped(SAMPLE_DATA))), start=1):
        conversation = parse(row)
        first = next(message["content"] for message in conversation.messages if message["role"] == "user")
        prompts.append(Prompt(number, str(conversation.meta.get("kind") or "other"), first))
    return prompts


def ranges(layers: Sequence[int]) -> str:
    """Ascending layers in the form of `--drafter self:`: [0, 1, 2, 5] -> `0-2,5`."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


# ------------------------------------------------------------------------------------------------ searching


def search_layers(
    target: Target, prompts: Sequence[Sequence[int]], skip: int, *, max_new_tokens: int = 64
) -> KeptLayers:
    """The layers to keep when `skip` of them are skipped, searched greedily on a few prompts (token ids).

    Removes one layer at a time: the one without which the others agree best with the target's own answers (greedy
    tokens, teacher-forced); of equals the one that leaves the answers the higher probability, then the later layer.
    Runs about skip * n_layers forwards of the target per answer. Deterministic.
    """
    if not 0 <= skip < target.n_layers:
        raise UserError(
            f"option skip: must be at least 0 and at most {target.n_layers - 1}, since target {target.name!r} must "
            f"keep a layer, got {skip}"
        )
    if not prompts:
        raise UserError("option prompts: at least one prompt is needed")
    texts = [(list(prompt), generate(target, prompt, max_new_tokens=max_new_tokens).tokens) for prompt in prompts]
    kept, best = list(range(target.n_layers)), (1.0, 0.0)
    rounds = sum(target.n_layers - left for left in range(skip))
    with Progress("search for layers to skip", rounds, "trial") as progress:
        for _ in range(skip):
            best = (-1.0, 0.0)
            for layer in reversed(kept):
                score = _agreement(target.subset([other for other in kept if other != layer]), texts)
                if score > best:
                    best, worst = score, layer
                progress.advance(note=f"agreement {best[0]:.3f}")
            kept.remove(worst)
    return KeptLayers(kept, best[0])


@torch.no_grad()
def _agreement(model: Target, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Share of the answers' tokens that the model ranks first, and their mean log-probability."""
    right = total = 0
    logp = 0.0
    for prompt, answer in texts:
        ids = torch.tensor([prompt + answer[:-1]], device=model.device)  # [1, P+A-1]
        hidden = model.forward(ids).hidden[0, len(prompt) - 1 :]  # [A, H]
        logps: Tensor = model.logits(hidden).log_softmax(-1)  # [A, V]
        truth = torch.tensor(answer, device=model.device)  # [A]
        right += int((logps.argmax(-1) == truth).sum())
        logp += float(logps.gather(-1, truth[:, None]).sum())
        total += len(answer)
    return right / total, logp / total
