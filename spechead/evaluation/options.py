"""What the commands that decode ask alike about models, text and drafts, and what is made of the answers.

Knows nothing of prompts, reports or terminals.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spechead.data.template_kwargs import template_warning
from spechead.decoding.generate import Speculation
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan
from spechead.decoding.verify import RULES
from spechead.drafters.base import Drafter
from spechead.drafters.parse import parse_drafter
from spechead.errors import UserError
from spechead.heads import Head
from spechead.heads.files import head_adapter, head_in_four_bits, head_target, head_template_kwargs, load_head
from spechead.target.loading import DTYPES
from spechead.target.model import Target


@dataclass(kw_only=True)
class ModelOptions:
    """Which models decode, and how they are loaded."""

    head: str = ""
    """Folder of a trained head."""
    target: str = ""
    """Model that decodes: smollm2-135m, a local folder or a hub id. Empty: the head's own."""
    adapter: str = ""
    """Folder or hub id of a peft adapter to merge into the target. Empty: without --target, the one that the head's
    own target carries."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}; empty: those of the head's training."""
    dtype: str = "float32"
    """Precision of the target: float32, bfloat16 or float16."""
    draft_dtype: str = "auto"
    """Precision of a head or a draft model. auto: bfloat16 where that is fast, else the target's; drafts are guesses
    that the target judges."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    force: bool = False
    """Use the head with a target that it was not trained for."""
    trust_remote_code: bool = False
    """Run Python code that comes with the files of the target or of a draft model."""

    def __post_init__(self) -> None:
        if not self.head and not self.target:
            raise UserError("no target: give --target, or --head, whose own target is then used")
        if self.draft_dtype not in ("auto", *DTYPES):
            raise UserError(f"draft-dtype {self.draft_dtype!r} is not one of auto, {', '.join(DTYPES)}")

    def load_target(self) -> Target:
        name = self.target or head_target(Path(self.head))
        adapter = self.adapter or ("" if self.target else head_adapter(Path(self.head)))
        return Target.load(
            name,
            adapter=adapter,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
        )

    def load_head(self, target: Target) -> Head:
        dtype = DTYPES[target.drafting_dtype(self.draft_dtype)]
        if head_in_four_bits(Path(self.head)):
            print(
                f"note: head {self.head} learned from its target in four bits; here the target is in {self.dtype}",
                file=sys.stderr,
            )
        return load_head(Path(self.head), target, force=self.force, dtype=dtype)

    def load_drafter(self, name: str, target: Target) -> Drafter:
        """The drafter without training of that name, see `drafters.named`."""
        return parse_drafter(name, target, dtype=self.draft_dtype, trust_remote_code=self.trust_remote_code)

    def template(self) -> dict[str, Any]:
        """The keywords for the chat template; says so on standard error where the head's training had others."""
        if not self.head:
            return self.template_kwargs
        trained = head_template_kwargs(Path(self.head))
        chosen = self.template_kwargs or trained
        if warning := template_warning(chosen, trained, f"head {self.head} was trained"):
            print(f"warning: {warning}", file=sys.stderr)
        return chosen


@dataclass(kw_only=True)
class DecodingOptions(ModelOptions):
    """How text is drawn, and how drafts are made and judged."""

    temperature: float = 0.0
    """0 always takes the likeliest token; above it, samples."""
    top_k: int = 0
    """Sample among the K likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1: all."""
    min_p: float = 0.0
    """Sample among the tokens at least this share as probable as the likeliest; 0: all."""
    repetition_penalty: float = 1.0
    """Above 1, makes tokens that the text already holds less likely."""
    seed: int = 0
    """Of the sampling; plain and speculative decoding share it."""
    rule: str = ""
    """How drafts are verified. exact_match: accept what the target itself draws. rejection, or block for chains: accept
    more of sampled drafts, with text of the same distribution. typical: Medusa's, LOSSY. Empty: exact_match, or
    rejection for sampled drafts."""
    draft_temperature: float = 0.0
    """0 drafts the likeliest tokens; above it, drafts are sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler()
        self.speculation()

    def sampler(self, seed: int | None = None) -> Sampler:
        """Raises UserError where an option of sampling makes no sense."""
        return Sampler(
            self.temperature,
            self.top_k,
            self.top_p,
            self.seed if seed is None else seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    def speculation(self, tree: Plan | None = None) -> Speculation:
        """How drafts in the form of `tree` are made and judged; UserError where they cannot be."""
        return Speculation(tree, self.rule, self.draft_temperature)

    @property
    def lossy(self) -> bool:
        """Whether the text may leave the target's distribution."""
        return not RULES[self.speculation().rule].lossless

    @property
    def comparable(self) -> bool:
        """Whether the text must be plain decoding's, token by token.

        Other lossless rules than exact_match give the same distribution, but sample from it with other random numbers.
        """
        return not self.lossy and (self.temperature == 0 or self.speculation().rule == "exact_match")
