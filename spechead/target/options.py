"""The options of every command that loads a target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from spechead.errors import UserError, first_line
from spechead.files import SURROGATE
from spechead.options import Options
from spechead.target.chat_template import ChatTemplate, check_date, read_template
from spechead.target.loading import DTYPES, choose_device, load_tokenizer, native_bfloat16
from spechead.target.model import Target


@dataclass(kw_only=True)
class TargetName(Options):
    """The target, for commands without further options for it."""

    target: str = ""
    """The target model: smollm2-135m (bundled), a local folder or a hub id."""
    trust_remote_code: bool = False
    """Run Python code shipped with the target's files."""


@dataclass(kw_only=True)
class TemplateOptions(TargetName):
    """The target's tokenizer and chat template, for commands that need no weights."""

    adapter: str = ""
    """Folder or hub id of a peft adapter to merge into the target; its own tokenizer and chat template are used, where
    it has them."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}."""
    chat_template: str = ""
    """Chat template in place of the tokenizer's own: a file, a Jinja text, or the name of one of several."""
    template_date: str = ""
    """The date that a template prints as today, YYYY-MM-DD; empty: today."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_date(self.template_date)
        try:
            json.dumps(self.template_kwargs, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise UserError(f"option template_kwargs: must be values that JSON has: {first_line(error)}") from error
        if SURROGATE.search(self.chat_template):
            raise UserError("option chat_template: is not valid UTF-8")

    def load_chat(self) -> ChatTemplate:
        """The tokenizer with the chat template of these options."""
        tokenizer = load_tokenizer(self.target, self.adapter, trust_remote_code=self.trust_remote_code)
        text = read_template(self.chat_template, tokenizer)
        return ChatTemplate(tokenizer, text, self.template_kwargs, self.template_date)


@dataclass(kw_only=True)
class TargetOptions(TemplateOptions):
    """The target, and how it is loaded."""

    dtype: str = "float32"
    """Precision of the target: float32, bfloat16, float16; auto is bfloat16 where the device computes it natively."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"option dtype: {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")

    @property
    def precision(self) -> str:
        """The name of the dtype, `auto` resolved."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if native_bfloat16(choose_device(self.device)) else "float32"

    def load(self, name: str = "", adapter: str = "", *, pack: bool = True, **template: Any) -> Target:
        """Load the target, or in the same way the one called `name` with `adapter`. `template`: other values of the
        options chat_template, template_kwargs and template_date."""
        own = {option: getattr(self, option) for option in ("chat_template", "template_kwargs", "template_date")}
        return Target.load(
            name or self.target,
            adapter=adapter if name else self.adapter,
            **own | template,
            dtype=self.precision,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            pack=pack,
        )
