"""The options of every command that decodes: which models, how they are loaded, and how they decode."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from spechead.data.template_record import template_warning
from spechead.decoding.generate import Speculation
from spechead.decoding.sampling import Sampler
from spechead.decoding.tree import Plan
from spechead.decoding.verify import RULES
from spechead.drafters.base import Drafter
from spechead.drafters.parse import load_drafter
from spechead.errors import UserError
from spechead.heads import Head
from spechead.heads.files import HeadInfo, load_head, read_info
from spechead.options import Range
from spechead.target.loading import DTYPES
from spechead.target.model import Target
from spechead.target.options import TargetOptions


@dataclass(kw_only=True)
class ModelOptions(TargetOptions):
    """Which models decode, and how they are loaded."""

    target: str = ""
    """Model that decodes: smollm2-135m, a local folder or a hub id. Empty: the head's own."""
    adapter: str = ""
    """Folder or hub id of a peft adapter to merge into the target. Empty: without --target, the adapter that the head
    was trained with."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}. Empty: those of the head's training."""
    chat_template: str = ""
    """Chat template in place of the tokenizer's own: a file, a Jinja text, or the name of one of several. Empty: the
    one of the head's training."""
    template_date: str = ""
    """The date that a template prints as today, YYYY-MM-DD. Empty: that of the head's training, else today."""
    trust_remote_code: bool = False
    """Run Python code shipped with the files of the target or of a draft model."""
    head: str = ""
    """Folder of a trained head."""
    max_new_tokens: Annotated[int, Range(1)] = 256
    """Longest answer, in tokens."""
    draft_dtype: str = "auto"
    """Precision of a head or a draft model. auto: bfloat16 where that is fast, else the target's; the target verifies
    every draft."""
    force: bool = False
    """Use the head with a target that it was not trained for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head and not self.target:
            raise UserError("option target: is empty; give --target, or --head, whose own target is then used")
        if self.draft_dtype not in ("auto", *DTYPES):
            raise UserError(f"option draft_dtype: {self.draft_dtype!r} is not one of auto, {', '.join(DTYPES)}")

    def head_info(self) -> HeadInfo:
        return read_info(Path(self.head))

    def load_target(self) -> Target:
        """The target of the options, or the head's own, with the chat template of `template`."""
        if self.target:
            return self.load(**self.template())
        info = self.head_info()
        return self.load(info.target, self.adapter or info.adapter, **self.template())

    def load_head(self, target: Target) -> Head:
        dtype = DTYPES[target.drafting_dtype(self.draft_dtype)]
        if self.head_info().four_bits:
            print(
                f"note: head {self.head} was trained with its target in four bits, here it is in {self.precision}",
                file=sys.stderr,
            )
        return load_head(Path(self.head), target, force=self.force, dtype=dtype)

    def load_drafter(self, name: str, target: Target) -> Drafter:
        """The training-free drafter of that name, see `drafters.parse`."""
        return load_drafter(name, target, dtype=self.draft_dtype, trust_remote_code=self.trust_remote_code)

    def template(self) -> dict[str, Any]:
        """The options template_kwargs, chat_template and template_date, where empty those of the head's training.

        Warns on standard error if the head was trained with others.
        """
        trained = self.head_info().template if self.head else {}
        names = ("template_kwargs", "chat_template", "template_date")
        chosen = {name: getattr(self, name) or trained.get(name, "") for name in names}
        chosen["template_kwargs"] = chosen["template_kwargs"] or {}
        if self.head and (warning := template_warning(chosen, trained, f"head {self.head} was trained")):
            print(f"warning: {warning}", file=sys.stderr)
        return chosen


@dataclass(kw_only=True)
class DecodingOptions(ModelOptions):
    """How tokens are sampled, and how drafts are made and verified."""

    temperature: Annotated[float, Range(0)] = 0.0
    """0: greedy; above it, samples."""
    top_k: Annotated[int, Range(0)] = 0
    """Sample among the K most likely tokens; 0: all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Sample among the most likely tokens that together have this probability; 1: all."""
    min_p: Annotated[float, Range(0, below=1)] = 0.0
    """Sample among the tokens at least this share as probable as the most likely one; 0: all."""
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0
    """Above 1, makes tokens that the sequence already contains less likely."""
    seed: int = 0
    """Seed of the sampling; plain and speculative decoding share it."""
    rule: str = ""
    """How drafts are verified. exact_match: accept what the target itself samples. rejection, or block for chains:
    accept more of sampled drafts, with text of the same distribution. typical: Medusa's, LOSSY. Empty: exact_match, or
    rejection for sampled drafts."""
    draft_temperature: Annotated[float, Range(0)] = 0.0
    """0 drafts the most likely tokens; above it, drafts are sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.speculation()

    def sampler(self, seed: int | None = None) -> Sampler:
        """The sampler of one sequence, by default with the options' own seed."""
        return Sampler(
            self.temperature,
            self.top_k,
            self.top_p,
            self.seed if seed is None else seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    def speculation(self, tree: Plan | None = None) -> Speculation:
        """How drafts in the form of `tree` are made and verified; UserError if the options do not fit it."""
        return Speculation(tree, self.rule, self.draft_temperature)

    @property
    def lossy(self) -> bool:
        """Whether the text may leave the target's distribution."""
        return not RULES[self.speculation().rule].lossless

    @property
    def comparable(self) -> bool:
        """Whether the text must equal plain decoding's, token by token.

        Other lossless rules than exact_match give the same distribution, but sample from it with other random numbers.
        """
        return not self.lossy and (self.temperature == 0 or self.speculation().rule == "exact_match")


def note_ignored_generation(target: Target) -> None:
    """Say on standard error what the target's generation config sets in vain."""
    if target.ignored_generation:
        settings = ", ".join(f"{name}={value}" for name, value in target.ignored_generation.items())
        print(
            f"note: not applied from the generation config of {target.name}, in no decoding: {settings}; "
            "sampling is set by options such as --temperature",
            file=sys.stderr,
        )
