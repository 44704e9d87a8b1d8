"""The options of every command that loads a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spechead.errors import UserError
from spechead.options import Options
from spechead.target.loading import DTYPES, choose_device, native_bfloat16
from spechead.target.model import Target


@dataclass(kw_only=True)
class TargetName(Options):
    """The target, for commands without further options for it."""

    target: str = ""
    """The target model: smollm2-135m (bundled), a local folder or a hub id."""
    trust_remote_code: bool = False
    """Run Python code shipped with the target's files."""


@dataclass(kw_only=True)
class TargetOptions(TargetName):
    """The target, and how it is loaded."""

    adapter: str = ""
    """Folder or hub id of a peft adapter to merge into the target."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}."""
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

    def load(self, name: str = "", adapter: str = "", *, pack: bool = True) -> Target:
        """Load the target, or in the same way the one called `name` with `adapter`."""
        return Target.load(
            name or self.target,
            adapter=adapter if name else self.adapter,
            dtype=self.precision,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            pack=pack,
        )
