"""What export, import and check ask alike: the target of a head that goes to other programs, or comes from there.

Knows nothing of formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from spechead.target.model import Target


@dataclass(kw_only=True)
class ServerTargetOptions:
    """The target, and what is let pass about it."""

    target: str = ""
    """The target: smollm2-135m, a local folder or a hub id. Empty: that of --head."""
    force: bool = False
    """Go on although the target's weights are not those that the head was trained for."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's files."""

    def load_target(self, name: str, adapter: str = "") -> Target:
        """In float32 on the CPU, with its weights as they are stored, since they are compared and written."""
        trust = self.trust_remote_code
        return Target.load(name, adapter=adapter, dtype="float32", device="cpu", trust_remote_code=trust, pack=False)
