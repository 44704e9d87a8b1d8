"""Build what a recipe describes: the target, the samples, the head, and the module that is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spechead.data.dataset import Sample, answers_of_other_models
from spechead.data.draft_vocabulary import draft_vocabulary
from spechead.data.preparation.prepare import cut_at_positions, prepare, remarks
from spechead.data.preparation.prepared import split_validation
from spechead.data.preparation.settings import Preparation
from spechead.data.template_record import template_warnings
from spechead.decoding.tree import parse_tree
from spechead.heads import HEADS, Head
from spechead.heads.init_from import InitHead
from spechead.target.loading import native_bfloat16
from spechead.target.model import Target
from spechead.training.distributed import Ranks
from spechead.training.joint import JointModule
from spechead.training.module import FeatureCache, TrainingModule
from spechead.training.recipe import DataConfig, Recipe


@dataclass
class Data:
    """The samples of a run, and what was noticed about them."""

    training: Sequence[Sample]
    validation: Sequence[Sample]
    place: Callable[[int], str]  # of the conversation in its source, by `Sample.row`
    dropped: dict[str, int]  # number of unusable conversations by reason
    foreign: str  # how many answers are not marked as the target's own; empty where all are


def load_data(recipe: Recipe, target: Target, ranks: Ranks) -> Data:
    """Prepare the recipe's conversations, or find them prepared, and split them; the first rank prints what is wrong
    with them."""
    preparation = preparation_of(recipe.data, target, recipe.seed)
    prepared = prepare(preparation, quiet=not ranks.first)
    foreign = answers_of_other_models(prepared.written_by, target.name)
    if ranks.first:
        warnings = template_warnings(target.chat.record(), recipe.data.sources())
        for line in [*warnings, *cut_at_positions(preparation), *remarks(prepared)]:
            print(f"data: {line}")
        if foreign:
            print(f"data: {foreign}; a head learns most from the target's own answers (spechead data synthesize)")
    training, validation = split_validation(prepared.samples, recipe.data.validation_share, recipe.seed)
    return Data(training, validation, prepared.samples.place, prepared.dropped, foreign)


def preparation_of(data: DataConfig, target: Target, seed: int) -> Preparation:
    """What the samples of a recipe for this target are made of, and how."""
    return Preparation(
        data.sources(),
        target.chat,
        data.max_length,
        weights=data.weights,
        history=data.history,
        limit=data.limit,
        seed=seed,
        vocab_size=target.vocab_size,
        positions=target.max_positions,
        strict=data.strict,
        streaming=data.streaming,
        workers=data.workers,
        prefix="data.",
    )


def bare_head(recipe: Recipe, target: Target) -> Head:
    """The recipe's head for the target, on the CPU; its vocabulary and weights are yet to be set."""
    kind = HEADS[recipe.head.kind]
    head = kind(kind.Config(**recipe.head.options), target)
    if recipe.head.tree:
        head.tree = parse_tree(recipe.head.tree)
    return head


def make_head(recipe: Recipe, target: Target, training: Sequence[Sample]) -> Head:
    """A new head for the target, with its draft vocabulary and initial weights."""
    head = bare_head(recipe, target)
    initial = InitHead(Path(recipe.head.init_from), head) if recipe.head.init_from else None
    kept = None if initial is None else initial.kept_ids(recipe.head.init_vocabulary)
    if head.reduced:
        head.set_vocabulary(draft_vocabulary(training, head.draft_size, target.vocab_size, kept))
    head.to(target.device)
    if recipe.engine.gradient_checkpointing:
        head.recompute = True
    if recipe.head.init_from_target:
        head.init_from_target()
    if initial is not None:
        initial.copy_into_head()
    return head


def make_module(
    recipe: Recipe, target: Target, training: Sequence[Sample], cache: FeatureCache, total: int
) -> TrainingModule:
    """What the engine trains for `total` steps: a new head, and with `adapter.peft` a new adapter on the target."""
    head = make_head(recipe, target, training)
    if recipe.adapter.peft:
        return JointModule(head, cache, target.adapt(recipe.adapter.peft), recipe.adapter, total)
    target.pack()
    return TrainingModule(head, cache)


def load_target(recipe: Recipe, bf16: bool) -> Target:
    dtype = recipe.target.dtype
    if dtype == "auto":
        dtype = "bfloat16" if bf16 else "float32"
    return Target.load(
        recipe.target.name,
        adapter=recipe.target.adapter,
        four_bits=recipe.target.four_bits,
        dtype=dtype,
        device=recipe.target.device,
        trust_remote_code=recipe.target.trust_remote_code,
        pack=False,
        chat_template=recipe.target.chat_template,
        template_kwargs=recipe.target.template_kwargs,
        template_date=recipe.target.template_date,
    )


def computes_bf16(precision: str, device: torch.device) -> bool:
    return precision == "bf16" or (precision == "auto" and native_bfloat16(device))
