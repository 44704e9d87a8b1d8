"""What a recipe is about, built: its target, its samples and its head.

Knows nothing of optimizers or of the folder of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from spechead.data.dataset import (
    Sample,
    answers_of_other_models,
    build_samples,
    draft_vocabulary,
    read_conversations,
    split_validation,
)
from spechead.data.template_kwargs import keywords_of_data, template_warning
from spechead.decoding.tree import parse_tree
from spechead.errors import UserError
from spechead.heads import HEADS, Head
from spechead.target.loading import native_bfloat16
from spechead.target.model import Target
from spechead.training.engine import Ranks
from spechead.training.init_from import InitHead
from spechead.training.recipe import Recipe


class Data(NamedTuple):
    """What a run learns from, and what is known of it."""

    training: list[Sample]
    validation: list[Sample]
    dropped: dict[str, int]  # conversations that cannot be used, by reason
    foreign: str  # how many answers are not marked as the target's own; empty where all are


def load_data(recipe: Recipe, target: Target, ranks: Ranks) -> Data:
    """Read, tokenise and split the recipe's conversations; the first rank says what is wrong with them."""
    sources, keywords = recipe.data.sources(), recipe.target.template_kwargs
    conversations = read_conversations(sources, recipe.data.limit)
    samples = build_samples(conversations, target.tokenizer, recipe.data.max_length, keywords)
    foreign = answers_of_other_models(conversations, target.name)
    if ranks.first:
        for source in sources:
            if warning := template_warning(keywords, keywords_of_data(source), f"{source} was written"):
                print(f"data: {warning} (option target.template_kwargs)")
        for why, count in samples.dropped.items():
            print(f"data: {count} of {len(conversations)} conversations {why}")
        if foreign:
            print(f"data: {foreign}; a head learns most from the target's own answers (spechead data synthesize)")
    training, validation = split_validation(samples.items, recipe.data.validation_share, recipe.seed)
    if not training:
        raise UserError(f"data.train {recipe.data.train}: no conversation is left to train on")
    return Data(training, validation, samples.dropped, foreign)


def bare_head(recipe: Recipe, target: Target) -> Head:
    """The recipe's head for the target, on the CPU, without vocabulary and weights that mean anything."""
    kind = HEADS[recipe.head.kind]
    head = kind(kind.Config(**recipe.head.options), target)
    if recipe.head.tree:
        head.tree = parse_tree(recipe.head.tree)
    return head


def make_head(recipe: Recipe, target: Target, training: Sequence[Sample]) -> Head:
    """A new head for the target: its draft vocabulary, and the weights that it starts from."""
    head = bare_head(recipe, target)
    earlier = InitHead(Path(recipe.head.init_from), head) if recipe.head.init_from else None
    kept = None if earlier is None else earlier.kept_ids(recipe.head.init_vocabulary)
    if head.reduced:
        head.set_vocabulary(draft_vocabulary(training, head.draft_size, target.vocab_size, kept))
    head.to(target.device)
    if recipe.engine.gradient_checkpointing:
        head.recompute = True
    if recipe.head.init_from_target:
        head.init_from_target()
    if earlier is not None:
        earlier.copy_into_head()
    return head


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
    )


def computes_bf16(precision: str, device: torch.device) -> bool:
    return precision == "bf16" or (precision == "auto" and native_bfloat16(device))
