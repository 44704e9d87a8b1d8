"""The folder of a training run: the settings it was begun with, and the head that it writes."""

from __future__ import annotations

import datetime
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead.data.template_record import date_of_data
from spechead.errors import UserError
from spechead.files import difference, flat, read_json, remove, write_json
from spechead.heads import Head
from spechead.heads.files import save_head
from spechead.target.adapter import FOLDER, Adapter
from spechead.target.chat_template import ChatTemplate
from spechead.training.checkpoints import list_checkpoints
from spechead.training.distributed import Ranks
from spechead.training.recipe import LogConfig, Recipe

STARTED, FINISHED, CHECKPOINTS = "recipe.json", "run.json", "checkpoints"
# Options that may change when a run is resumed. Once it has finished, its head is chosen, and log.best may not.
_FREE_AT_END = [f"log.{option.name}" for option in fields(LogConfig) if option.name != "best"]
_FREE_AT_END += [f"data.{name}" for name in ("strict", "streaming", "workers")]
_FREE_AT_END += ["out", "target.template_date", "engine.threads", "engine.feature_memory_gb"]
_FREE_AT_END += ["engine.gradient_checkpointing"]
FREE_OPTIONS = [*_FREE_AT_END, "log.best"]
SPLIT_OPTIONS = ("max_length", "validation_share", "limit", "weights", "history")  # that decide what is held out


def claim_run(recipe: Recipe, out: Path, ranks: Ranks, facts: dict[str, Any]) -> None:
    """Write the settings of the run in `out`, or raise UserError if it was begun with others.

    `facts`: what identifies the target and the data; they must be the same, too, and so must the number of processes.
    """
    settings = recipe.to_dict() | {"facts": facts | {"processes": ranks.world}}
    if list_checkpoints(out / CHECKPOINTS):
        _refuse_other(settings, out, FREE_OPTIONS)
    ranks.barrier()
    if ranks.first:
        write_json(out / STARTED, settings)


def settle_date(recipe: Recipe, out: Path, ranks: Ranks) -> None:
    """Set the date that the chat template prints, where the recipe leaves it open: that of the run in `out`, which may
    have begun on an earlier day, else that of the data, else today's, the same on all ranks."""
    if recipe.target.template_date:
        return
    today = int(ranks.sum(torch.tensor(datetime.date.today().toordinal() if ranks.first else 0)))
    earlier = read_json(out / STARTED) if (out / STARTED).is_file() else None
    target = earlier.get("target") if isinstance(earlier, dict) else None
    recorded = target.get("template_date") if isinstance(target, dict) else None
    recorded = recorded or date_of_data(recipe.data.sources())
    recipe.target.template_date = str(recorded or datetime.date.fromordinal(today).isoformat())


def refuse_other_recipe(recipe: Recipe, out: Path) -> None:
    """Raise UserError if the finished run in `out` was begun with another recipe."""
    _refuse_other(recipe.to_dict(), out, [*_FREE_AT_END, "facts."])


def _refuse_other(settings: dict[str, Any], out: Path, free: list[str]) -> None:
    path = out / STARTED
    earlier = read_json(path) if path.is_file() else None
    remedy = "choose another --out, or remove that folder"
    if not isinstance(earlier, dict):
        raise UserError(f"option out: {out} contains a run, and its {STARTED} is missing or no recipe: {remedy}")
    defaults = flat(Recipe().to_dict())  # of options that did not exist when the run began
    changed = difference(settings, defaults | flat(earlier), free)
    if changed is not None:
        name, now, before = changed
        raise UserError(f"option out: {out} contains a run with {name} = {before!r}, now {now!r}: {remedy}")


def head_weights(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors by its own names, from the master weights of a `TrainingModule`."""
    return {name.removeprefix("head."): tensor for name, tensor in masters.items() if name.startswith("head.")}


def write_head(
    meta: dict[str, Any], head: Head, adapter: Adapter | None, masters: dict[str, Tensor], folder: Path
) -> None:
    """Write the head with the weights `masters`, and in its folder the adapter that was trained along with it.

    The head is then for the target with that adapter: `head.target` gets its fingerprint.
    """
    if adapter is None:
        remove(folder / FOLDER)  # of another run
    else:
        adapter.load([masters[f"adapter_parameters.{i}"] for i in range(len(adapter.parameters))])
        adapter.save(folder / FOLDER)
        head.target.fingerprint = adapter.fingerprint(head.target.fingerprint)
    save_head(head, folder, meta, head_weights(masters))


def head_meta(recipe: Recipe, steps: int, foreign: str, chat: ChatTemplate) -> dict[str, Any]:
    """How a head was trained, for its config.json. `foreign`: see `build.Data`."""
    target = recipe.target
    split = {name: getattr(recipe.data, name) for name in SPLIT_OPTIONS}
    meta = {"data": recipe.data.train, "split": split | {"seed": recipe.seed}, "steps": steps}
    meta |= {"foreign": foreign} | chat.record()
    flags = {"four_bits": target.four_bits, "adapter": bool(recipe.adapter.peft)}
    return meta | {name: True for name, value in flags.items() if value}
