"""Training-free drafters by name: `parse_drafter` checks a text without a model, `load_drafter` makes the drafter."""

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
from spechead.target.loading import dtype_name
from spechead.target.model import Target

GRAMMAR = (
    "prompt_lookup, prompt_lookup:ngram=3,match=latest, draft_model:FOLDER, self:0-9,20-29 (decoder layers of the "
    "target), staged:draft_model:FOLDER+prompt_lookup or staged:self:0-9+prompt_lookup"
)
_OPTION = r"(ngram=\d{1,4}|match=\w+)"
_RANGE = r"\d{1,4}(-\d{1,4})?"


@dataclass(frozen=True)
class ModelLoader:
    """Loads draft models for a target: to the same device, and packed if the target is."""

    target: Target
    dtype: str = "auto"  # see `Target.drafting_dtype`
    trust_remote_code: bool = False

    def load(self, name: str) -> Target:
        """The model of that name; under the target's own name, the target itself without a second copy."""
        if name == self.target.name and self.dtype in ("auto", dtype_name(self.target.dtype)):
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


MakeModel = Callable[[Target, ModelLoader], DraftModel]
MakeUnstaged = Callable[[Target, ModelLoader], DraftModel | PromptLookup]


@dataclass(frozen=True)
class DrafterSpec:
    """A parsed drafter: its class, and the function that makes it for a target."""

    kind: type[Drafter]
    make: Callable[[Target, ModelLoader], Drafter]


def load_drafter(text: str, target: Target, *, dtype: str = "auto", trust_remote_code: bool = False) -> Drafter:
    """The drafter described by `text`, for `target`; a draft model is loaded in `dtype`.

    Raises UserError where the text is no drafter, or its draft model or layers do not fit the target.
    """
    return parse_drafter(text).make(target, ModelLoader(target, dtype, trust_remote_code))


def parse_drafter(text: str) -> DrafterSpec:
    """Parse the description of a drafter; needs no target. Raises UserError where it is none."""
    kind, _, rest = text.partition(":")
    if kind == "staged":
        return DrafterSpec(Staged, _staged(rest))
    return DrafterSpec(PromptLookup if kind == "prompt_lookup" else DraftModel, _unstaged(text))


def _staged(text: str) -> Callable[[Target, ModelLoader], Staged]:
    """`MIDDLE+TINY`, split at the last plus sign. Tiny drafts for the middle; its layer numbers are relative to it."""
    middle_text, _, tiny_text = text.rpartition("+")
    _unstaged(middle_text)
    make_middle, make_tiny = _model(middle_text), _unstaged(tiny_text)
    if make_middle is None:
        raise UserError(f"option drafter: {middle_text!r} in 'staged:{text}' is not a model; use draft_model or self")

    def make(target: Target, loader: ModelLoader) -> Staged:
        middle = make_middle(target, loader)
        return Staged(middle, make_tiny(middle.draft, loader))

    return make


def _unstaged(text: str) -> MakeUnstaged:
    lookup, model = _lookup(text), _model(text)
    if model is not None:
        return model
    if lookup is not None:
        return lambda target, loader: lookup
    raise UserError(f"option drafter: {text!r} is not a drafter; use {GRAMMAR}")


def _lookup(text: str) -> PromptLookup | None:
    kind, _, rest = text.partition(":")
    if kind != "prompt_lookup" or not (text == kind or re.fullmatch(f"{_OPTION}(,{_OPTION})*", rest)):
        return None
    options = dict(option.split("=") for option in rest.split(",") if option)
    return PromptLookup(int(options.get("ngram", 3)), options.get("match", "first"))


def _model(text: str) -> MakeModel | None:
    kind, _, rest = text.partition(":")
    if kind == "draft_model" and rest:
        return lambda target, loader: DraftModel(target, loader.load(rest))
    if kind == "self" and re.fullmatch(f"{_RANGE}(,{_RANGE})*", rest):
        layers = _layers(rest)
        return lambda target, loader: SelfSpeculative(target, _existing(layers, target))
    return None


def _layers(text: str) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]."""
    layers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
        if int(last or first) < int(first) or layers != sorted(set(layers)):
            raise UserError(f"option drafter: layers of 'self:{text}' must ascend, as in self:0-9,20-29")
    return layers


def _existing(layers: list[int], target: Target) -> list[int]:
    if layers[-1] >= target.n_layers:
        raise UserError(f"option drafter: {target.name!r} has layers 0-{target.n_layers - 1}, not {layers[-1]}")
    return layers
