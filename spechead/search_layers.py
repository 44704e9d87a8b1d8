"""`spechead search-layers`: which of its own layers a target may leave out when it drafts for itself.

Prints them as `--drafter` takes them. Knows nothing of how they are found: `drafters/self_speculative.py` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from spechead.chat import prompt_ids
from spechead.drafters.self_speculative import Kept, search_layers
from spechead.errors import UserError
from spechead.files import shipped
from spechead.prompts import read_prompts, spread
from spechead.target import Target


@dataclass
class SearchOptions:
    """Find which layers a target may leave out when it drafts for itself; standard output is a --drafter."""

    target: str
    """Embedded target, local folder or hub id."""
    skip: int
    """Layers to leave out."""
    prompts: str = ""
    """JSONL file of prompts to search on; empty: the shipped held-out ones, which eval measures on by default. What was
    found on some prompts is best measured on others."""
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


def search(options: SearchOptions) -> Kept:
    """Search, print the layers kept as a drafter to standard output, and all about them to standard error."""
    path = Path(options.prompts) if options.prompts else shipped("eval/prompts/held_out.jsonl")
    prompts = spread(read_prompts(path), options.limit)
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


def ranges(layers: Sequence[int]) -> str:
    """Ascending numbers as `--drafter self:` takes them: [0, 1, 2, 5] -> `0-2,5`."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
