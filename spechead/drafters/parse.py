"""From a line of text to a drafter without training. Knows nothing of how one drafts.

A text is understood before any model is loaded, so that a misspelt one costs no time; `make` then takes the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from spechead.drafters.base import Drafter
from spechead.drafters.draft_model import DraftModel
from spechead.drafters.prompt_lookup import PromptLookup
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.drafters.staged import Staged
from spechead.errors import UserError
from spechead.target.model import Target

UNDERSTOOD = (
    "prompt_lookup or prompt_lookup:ngram=3,match=latest, draft_model:FOLDER, self:0-9,20-29 (the layers kept), "
    "staged:draft_model:FOLDER+prompt_lookup, staged:self:0-9+prompt_lookup"
)
_OPTION = r"(ngram=\d{1,4}|match=\w+)"
_RANGE = r"\d{1,4}(-\d{1,4})?"


@dataclass(frozen=True)
class Loading:
    """How draft models are loaded beside a target: to its device, packed where it is."""

    target: Target
    dtype: str = "auto"  # see `draft_model.drafting_dtype`
    trust_remote_code: bool = False

    def model(self, name: str) -> Target:
        """The model of that name. The target's own name stands for the target, without a second copy."""
        own = str(self.target.dtype).removeprefix("torch.")
        if name == self.target.name and self.dtype in ("auto", own):
            return self.target
        try:
            return Target.load(
                name,
                dtype=self.target.drafting_dtype(self.dtype),
                device=str(self.target.device),
                trust_remote_code=self.trust_remote_code,
                pack=self.target.packed,
            )
        except UserError as error:
            raise UserError(f"draft model: {error}") from error


MakeModel = Callable[[Target, Loading], DraftModel]
MakeUnstaged = Callable[[Target, Loading], DraftModel | PromptLookup]


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter whose name is understood."""

    kind: type[Drafter]
    make: Callable[[Target, Loading], Drafter]


def parse_drafter(text: str, target: Target, *, dtype: str = "auto", trust_remote_code: bool = False) -> Drafter:
    """The drafter that `text` names, for `target`; a draft model is loaded in `dtype`.

    Raises UserError where the text is not understood, or its draft model or layers do not fit the target.
    """
    return read_drafter(text).make(target, Loading(target, dtype, trust_remote_code))


def read_drafter(text: str) -> DrafterSpec:
    """Understand the name of a drafter, without a target. Raises UserError where it is none."""
    kind, _, rest = text.partition(":")
    if kind == "staged":
        return DrafterSpec(Staged, _staged(rest))
    return DrafterSpec(PromptLookup if kind == "prompt_lookup" else DraftModel, _unstaged(text))


def _staged(text: str) -> Callable[[Target, Loading], Staged]:
    """`MIDDLE+TINY`: the last plus sign separates the two. Tiny drafts for the middle, whose layers it counts."""
    middle_text, _, tiny_text = text.rpartition("+")
    _unstaged(middle_text)
    make_middle, make_tiny = _model(middle_text), _unstaged(tiny_text)
    if make_middle is None:
        raise UserError(f"drafter 'staged:{text}': {middle_text!r} is no model whose drafting could be sped up")

    def make(target: Target, loading: Loading) -> Staged:
        middle = make_middle(target, loading)
        return Staged(middle, make_tiny(middle.draft, loading))

    return make


def _unstaged(text: str) -> MakeUnstaged:
    lookup, model = _lookup(text), _model(text)
    if model is not None:
        return model
    if lookup is not None:
        return lambda target, loading: lookup
    raise UserError(f"drafter {text!r} is not understood; known are {UNDERSTOOD}")


def _lookup(text: str) -> PromptLookup | None:
    kind, _, rest = text.partition(":")
    if kind != "prompt_lookup" or not (text == kind or re.fullmatch(f"{_OPTION}(,{_OPTION})*", rest)):
        return None
    options = dict(option.split("=") for option in rest.split(",") if option)
    return PromptLookup(int(options.get("ngram", 3)), options.get("match", "first"))


def _model(text: str) -> MakeModel | None:
    kind, _, rest = text.partition(":")
    if kind == "draft_model" and rest:
        return lambda target, loading: DraftModel(target, loading.model(rest))
    if kind == "self" and re.fullmatch(f"{_RANGE}(,{_RANGE})*", rest):
        layers = _layers(rest)
        return lambda target, loading: SelfSpeculative(target, _present(layers, target))
    return None


def _layers(text: str) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]."""
    layers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
        if int(last or first) < int(first) or layers != sorted(set(layers)):
            raise UserError(f"drafter 'self:{text}': layers ascend, each named once, as in self:0-9,20-29")
    return layers


def _present(layers: list[int], target: Target) -> list[int]:
    if layers[-1] >= target.n_layers:
        raise UserError(f"drafter 'self': {target.name!r} has no layer {layers[-1]}, only 0-{target.n_layers - 1}")
    return layers
