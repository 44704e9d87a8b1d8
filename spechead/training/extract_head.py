"""`spechead extract-head RUN`: write the head of a checkpoint, whether or not its run has finished.

Needs the run's folder and its target, but not its data, and one process however many trained.
"""

from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console

from spechead.errors import UserError
from spechead.files import read_json
from spechead.training.build import bare_head, load_target
from spechead.training.checkpoints import list_checkpoints, read_weights, step_of
from spechead.training.recipe import Recipe, check_head
from spechead.training.run_folder import CHECKPOINTS, STARTED, head_meta, head_weights, write_head


@dataclass
class ExtractOptions:
    """Write the head of a checkpoint, whether or not its run has finished."""

    run: str
    """Folder of the run, with recipe.json and checkpoints/."""
    step: int = 0
    """Optimizer step after which the checkpoint was written; 0: the newest."""
    out: str = ""
    """Folder to write; empty: head-step-N in the run's folder."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's files."""


def extract_head(options: ExtractOptions) -> Path:
    """Write the head and return its folder.

    For the checkpoint that `log.best` selects, it equals the head that the finished run writes.

    Raises UserError if the folder is not that of a run, has no such checkpoint, or the target's weights have changed.
    """
    run = Path(options.run)
    recipe, facts = read_run(run)
    checkpoint = choose_checkpoint(run / CHECKPOINTS, options.step)
    step = step_of(checkpoint)
    out = Path(options.out) if options.out else run / f"head-step-{step}"
    with Console(stderr=True).status("loading the target and the checkpoint"):
        masters = read_weights(checkpoint)
        # On the CPU: the accelerator may be busy with the run, and only shapes and the fingerprint matter
        simple = replace(recipe.target, device="cpu", four_bits=False, trust_remote_code=options.trust_remote_code)
        target = load_target(replace(recipe, target=simple), bf16=False)
    if target.fingerprint != facts["target"]:
        raise UserError(f"option run: the weights of target {target.name!r} have changed since {run} began")
    head = bare_head(recipe, target)
    try:
        head.load_state_dict(head_weights(masters))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit {run / STARTED}: {' '.join(str(error).split())}") from error
    adapter = target.adapt(recipe.adapter.peft) if recipe.adapter.peft else None
    write_head(head_meta(recipe, step, facts.get("foreign", ""), target.chat), head, adapter, masters, out)
    print(f"head of step {step}: {out}\nmeasure it:      spechead eval --head {out}")
    return out


def read_run(run: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe that `run` was begun with, and the facts about its target and data: see `run_folder.claim_run`."""
    path = run / STARTED
    if not path.is_file():
        raise UserError(f"option run: {run} is not the folder of a run, it has no {STARTED}")
    tree: Any = read_json(path)
    kinds = get_type_hints(Recipe)
    try:
        facts = dict(tree.pop("facts"))
        facts["target"] = str(facts["target"])
        parts = {name: kinds[name](**part) if is_dataclass(kinds[name]) else part for name, part in tree.items()}
        recipe = Recipe(**parts)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a recipe that this version can read: {error}") from error
    check_head(recipe.head)
    return recipe, facts


def choose_checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint of a step, or the newest for 0."""
    by_step = {step_of(path): path for path in list_checkpoints(folder)}
    if not by_step:
        raise UserError(f"option run: no checkpoint in {folder}, one is written every log.checkpoint_every steps")
    if step and step not in by_step:
        known = ", ".join(map(str, by_step))
        raise UserError(f"option step: no checkpoint of step {step} in {folder} (known: {known})")
    return by_step[step or max(by_step)]
