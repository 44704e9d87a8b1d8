"""`spechead extract-head RUN`: make a head of a checkpoint, whether or not its run came to an end.

"Extract", since the head's weights are taken as they are out of all that a checkpoint holds; "export" is for other
programs' formats, and "head" alone would not say what is done. Needs the run's folder and its target, but not its data,
and one process however many trained. Knows nothing of what DeepSpeed writes: `engine` reads it.
"""

from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console

from spechead.errors import UserError
from spechead.files import read_json
from spechead.training.build import bare_head, load_target
from spechead.training.engine import checkpoints, saved_masters, step_of
from spechead.training.recipe import Recipe, check_head
from spechead.training.run_folder import CHECKPOINTS, STARTED, head_meta, head_weights, write_head


@dataclass
class ExtractOptions:
    """Make a head of a checkpoint, whether or not its run came to an end."""

    run: str
    """Folder of the run, which holds recipe.json and checkpoints/."""
    step: int = 0
    """Optimizer step after which the checkpoint was written; 0 takes the newest."""
    out: str = ""
    """Folder to write; empty: head-step-N in the run's folder."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target's files."""


def extract_head(options: ExtractOptions) -> Path:
    """Write the head and return its folder.

    Of the checkpoint that `log.best` chose, it is the head that the finished run wrote.

    Raises UserError where the folder is not a run's, has no such checkpoint, or the target is no longer the run's.
    """
    run = Path(options.run)
    recipe, facts = read_run(run)
    checkpoint = choose(run / CHECKPOINTS, options.step)
    step = step_of(checkpoint)
    out = Path(options.out) if options.out else run / f"head-step-{step}"
    with Console(stderr=True).status("loading the target and the checkpoint"):
        masters = saved_masters(checkpoint)
        # on the CPU, since the accelerator may be busy with the run, and only shapes and the fingerprint matter
        simple = replace(recipe.target, device="cpu", four_bits=False, trust_remote_code=options.trust_remote_code)
        target = load_target(replace(recipe, target=simple), bf16=False)
    if target.fingerprint != facts["target"]:
        raise UserError(f"target {target.name!r} has other weights now than when {run} began: a head fits one alone")
    head = bare_head(recipe, target)
    try:
        head.load_state_dict(head_weights(masters))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} and {run / STARTED} do not fit: {' '.join(str(error).split())}") from error
    adapter = target.adapt(recipe.adapter.peft) if recipe.adapter.peft else None
    write_head(head_meta(recipe, step, facts.get("foreign", "")), head, adapter, masters, out)
    print(f"head of step {step}: {out}\nmeasure it:      spechead eval --head {out}")
    return out


def read_run(run: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe that `run` began with, and the facts beside it; its target's fingerprint is among them."""
    path = run / STARTED
    if not path.is_file():
        raise UserError(f"{run} is not the folder of a run: it holds no {STARTED}")
    tree: Any = read_json(path)
    kinds = get_type_hints(Recipe)
    try:
        facts = dict(tree.pop("facts"))
        facts["target"] = str(facts["target"])
        parts = {name: kinds[name](**part) if is_dataclass(kinds[name]) else part for name, part in tree.items()}
        recipe = Recipe(**parts)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a recipe as this version writes it: {error}") from error
    check_head(recipe.head)
    return recipe, facts


def choose(folder: Path, step: int) -> Path:
    """The checkpoint of a step, or the newest for 0."""
    found = {step_of(path): path for path in checkpoints(folder)}
    if not found:
        raise UserError(f"no checkpoint in {folder}: a run writes one every log.checkpoint_every steps and at its end")
    if step and step not in found:
        raise UserError(
            f"option step: no checkpoint of step {step} in {folder} (there are {', '.join(map(str, found))})"
        )
    return found[step or max(found)]
