"""The folder of a training run: whose run it is, and the head that comes out of it.

Knows nothing of how a run trains.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from spechead.errors import UserError
from spechead.files import read_json, write_json
from spechead.heads import Head
from spechead.heads.files import save_head
from spechead.target.adapter import FOLDER, Adapter
from spechead.training.engine import Ranks, checkpoints
from spechead.training.recipe import Recipe

STARTED, FINISHED, CHECKPOINTS = "recipe.json", "run.json", "checkpoints"
# what may change when a run is carried on
FREE_OPTIONS = ("log.", "out", "engine.threads", "engine.feature_memory_gb", "engine.gradient_checkpointing")


def claim(recipe: Recipe, out: Path, ranks: Ranks, facts: dict[str, Any]) -> None:
    """Note what the run in `out` is, or refuse to carry on with another recipe, target, data or number of processes."""
    path = out / STARTED
    mine = recipe.to_dict() | {"facts": facts | {"processes": ranks.world}}
    if checkpoints(out / CHECKPOINTS):
        refuse_other(mine, out)
    ranks.barrier()
    if ranks.first:
        write_json(path, mine)


def refuse_other(mine: dict[str, Any], out: Path) -> None:
    """A run is carried on only as it began, but for `FREE_OPTIONS`."""
    path = out / STARTED
    earlier = read_json(path) if path.is_file() else None
    if not isinstance(earlier, dict):
        raise UserError(
            f"{out} holds a run, and its {STARTED} is missing or no recipe: choose another --out, or remove that folder"
        )
    now, before = _flat(mine), _flat(Recipe().to_dict()) | _flat(earlier)  # options that it did not know were unset
    finished = "facts" not in mine  # they need no second look then
    free = (*FREE_OPTIONS, "facts.") if finished else FREE_OPTIONS
    for name in sorted(now.keys() | before.keys()):
        settled = finished and name == "log.best"  # the head is made
        if now.get(name) != before.get(name) and (settled or not name.startswith(free)):
            raise UserError(
                f"{out} holds a run with {name} = {before.get(name)!r}, now {now.get(name)!r}: "
                "choose another --out, or remove that folder"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def head_weights(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors by its own names, out of those of `TrainingModule`."""
    return {name.removeprefix("head."): tensor for name, tensor in masters.items() if name.startswith("head.")}


def write_head(
    meta: dict[str, Any], head: Head, adapter: Adapter | None, masters: dict[str, Tensor], folder: Path
) -> None:
    """Write the head with the weights `masters`, and beside it the adapter that was trained with it.

    The head is then for the target that carries the adapter, and `head.target` becomes that one.
    """
    if adapter is None:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)  # of another run
    else:
        adapter.load([tensor for name, tensor in masters.items() if name.startswith("adapter_parameters.")])
        adapter.save(folder / FOLDER)
        head.target.fingerprint = adapter.fingerprint(head.target.fingerprint)
    save_head(head, folder, meta, head_weights(masters))


def head_meta(recipe: Recipe, steps: int, foreign: str) -> dict[str, Any]:
    """What a head's file says of the training behind it; `foreign`: see `build.Data`."""
    target = recipe.target
    split = {name: getattr(recipe.data, name) for name in ("max_length", "validation_share", "limit")}
    meta = {"data": recipe.data.train, "split": split | {"seed": recipe.seed}, "steps": steps}
    meta |= {"template_kwargs": target.template_kwargs, "foreign": foreign}
    flags = {"four_bits": target.four_bits, "adapter": bool(recipe.adapter.peft)}
    return meta | {name: True for name, so in flags.items() if so}
