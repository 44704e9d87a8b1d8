"""`spechead search-layers`: which of its own layers a target may leave out when it drafts for itself.

Prints them as `--drafter` takes them. Knows nothing of how they are drafted with.

Legend: P prompt tokens, A tokens the target wrote behind them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from spechead.data.chat import prompt_ids
from spechead.data.dataset import read_file
from spechead.data.prompts import Prompt, balanced, read_prompts
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.files import shipped
from spechead.progress import Progress
from spechead.target.model import Target

SAMPLE_DATA = "data/sample.jsonl"


@dataclass
class SearchOptions:
    """Find which layers a target may leave out when it drafts for itself; standard output is a --drafter."""

    target: str
    """Embedded target, local folder or hub id."""
    skip: int
    """Layers to leave out."""
    prompts: str = ""
    """JSONL file of prompts to search on, {"question_id", "category", "turns"} a line; empty: those of the shipped
    sample data. What was found on some prompts is to be measured on others, as eval does by default."""
    limit: int = 4
    """Prompts to use, spread over the file's categories; time grows with them."""
    max_new_tokens: int = 64
    """Tokens that the target writes behind each prompt."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}."""
    dtype: str = "float32"
    """Precision of the target: float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's files."""

    def __post_init__(self) -> None:
        for name in ("limit", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"option {name}: must be at least 1, got {getattr(self, name)}")


@dataclass
class Kept:
    """Decoder layers to draft with, and how far they may be trusted."""

    layers: list[int]
    agreement: float  # share of the searched texts' tokens that these layers would have drafted right


def search(options: SearchOptions) -> Kept:
    """Search, print the layers kept as a drafter to standard output, and all about them to standard error."""
    prompts = balanced(read_prompts(Path(options.prompts)) if options.prompts else sample_prompts(), options.limit)
    notes = Console(stderr=True, highlight=False, markup=False)
    with notes.status("loading the target"):
        target = Target.load(
            options.target,
            dtype=options.dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )
    ids = [
        prompt_ids(target.tokenizer, [{"role": "user", "content": prompt.text}], options.template_kwargs)
        for prompt in prompts
    ]
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
    """What the user says first in the conversations of the shipped sample data."""
    found = []
    for number, row in enumerate(read_file(shipped(SAMPLE_DATA)), start=1):
        first = next(message["content"] for message in row["messages"] if message["role"] == "user")
        found.append(Prompt(number, str((row.get("meta") or {}).get("kind") or "other"), first))
    return found


def ranges(layers: Sequence[int]) -> str:
    """Ascending numbers as `--drafter self:` takes them: [0, 1, 2, 5] -> `0-2,5`."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


# ------------------------------------------------------------------------------------------------ searching


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
