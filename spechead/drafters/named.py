"""From a line of text to a drafter without training. Knows nothing of how one drafts."""

from __future__ import annotations

import re

from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged
from spechead.errors import UserError
from spechead.target import DTYPES, Target

UNDERSTOOD = (
    "prompt_lookup or prompt_lookup:ngram=3,match=latest, draft_model:FOLDER, self:0-9,20-29 (the layers kept), "
    "staged:draft_model:FOLDER+prompt_lookup, staged:self:0-9+prompt_lookup"
)
_OPTION = r"(ngram=\d{1,4}|match=\w+)"
_RANGE = r"\d{1,4}(-\d{1,4})?"


def parse_drafter(text: str, target: Target) -> DraftModel | PromptLookup | Staged:
    """The drafter that `text` names, for `target`. A draft model is loaded in the target's dtype, to its device.

    In `staged:MIDDLE+TINY` the last plus sign separates the two. Raises UserError where a text is not understood, or
    its draft model or layers do not fit the target.
    """
    kind, _, rest = text.partition(":")
    if kind != "staged":
        return _unstaged(text, target)
    middle_text, _, tiny_text = rest.rpartition("+")
    middle = _unstaged(middle_text, target)
    if not isinstance(middle, DraftModel):
        raise UserError(f"drafter {text!r}: {middle_text!r} is no model whose drafting could be sped up")
    return Staged(middle, _unstaged(tiny_text, middle.draft))


def _unstaged(text: str, target: Target) -> DraftModel | PromptLookup:
    kind, _, rest = text.partition(":")
    if kind == "prompt_lookup" and (text == kind or re.fullmatch(f"{_OPTION}(,{_OPTION})*", rest)):
        options = dict(option.split("=") for option in rest.split(",") if option)
        return PromptLookup(int(options.get("ngram", 3)), options.get("match", "first"))
    if kind == "draft_model" and rest:
        return DraftModel(target, _load_beside(target, rest))
    if kind == "self" and re.fullmatch(f"{_RANGE}(,{_RANGE})*", rest):
        return SelfSpeculative(target, _numbers(rest, target))
    raise UserError(f"drafter {text!r} is not understood; known are {UNDERSTOOD}")


def _load_beside(target: Target, name: str) -> Target:
    dtype = next(known for known, dtype in DTYPES.items() if dtype == target.dtype)
    try:
        return Target.load(name, dtype=dtype, device=str(target.device), pack=target.packed)
    except UserError as error:
        raise UserError(f"draft model: {error}") from error


def _numbers(text: str, target: Target) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] >= target.n_layers:
            raise UserError(
                f"drafter 'self:{text}': {part} is no range of the layers 0-{target.n_layers - 1} of {target.name!r}"
            )
        numbers += span
    return numbers
