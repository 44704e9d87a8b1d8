"""The target of export, import and check."""

from __future__ import annotations

from dataclasses import dataclass

from spechead.target.model import Target
from spechead.target.options import TargetName


@dataclass(kw_only=True)
class ExchangeOptions(TargetName):
    """A target whose weights are compared or written, and so loaded as they are stored."""

    force: bool = False
    """Accept a target whose weights differ from those that the head was trained for."""

    def load_target(self, name: str = "", adapter: str = "") -> Target:
        """Load the target, or the one called `name`, in float32 on the CPU."""
        return Target.load(
            name or self.target,
            adapter=adapter,
            dtype="float32",
            device="cpu",
            trust_remote_code=self.trust_remote_code,
            pack=False,
        )
