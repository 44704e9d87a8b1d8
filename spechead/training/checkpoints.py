"""The checkpoints of a run: what they contain, how they are named and listed, and which are kept.

checkpoints/step-00000120/
    head.safetensors                 float32 master weights of the head (and of an adapter trained with it),
                                     averaged where an average is kept; for `spechead extract-head`
    mp_rank_00_model_states.pt, ...  DeepSpeed's files, to resume from
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from spechead.errors import UserError, first_line
from spechead.files import make_folder, reason, remove, replacing
from spechead.heads.files import read_tensors, write_tensors
from spechead.training.distributed import Ranks
from spechead.training.engine import Engine

WEIGHTS = "head.safetensors"
_STEP = "step-"


@dataclass
class TrainState:
    """How far a run is: what a checkpoint contains besides weights, optimizer and random state."""

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # supervised tokens seen in them
    validations: list[tuple[int, float]] = field(default_factory=list)  # step and acceptance length (tokens per pass)

    @property
    def best(self) -> int:
        """The step of the greatest acceptance length, the first of equal ones; 0 before any validation."""
        return max(self.validations, key=lambda one: one[1], default=(0, 0.0))[0]

    def should_stop(self, patience: int) -> bool:
        """Whether at least `patience` validations have passed since the best one; never for 0."""
        return 0 < patience <= sum(step > self.best for step, _ in self.validations)


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    paths = folder.glob(f"{_STEP}*") if folder.is_dir() else ()
    return sorted(path for path in paths if path.is_dir() and path.name.removeprefix(_STEP).isdecimal())


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_STEP))


def save(folder: Path, state: TrainState, engine: Engine, ranks: Ranks, keep: int) -> None:
    """Write `folder`/step-N whole or not at all, then remove all but the newest `keep` and the best. Collective."""
    path = folder / f"{_STEP}{state.step:08d}"
    partial = folder / f".{path.name}.tmp"  # every rank writes there
    make_folder(folder)
    weights = engine.master_weights()
    try:
        engine.save(partial, asdict(state))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        remove(partial)
        why = reason(error) if isinstance(error, OSError) else first_line(error)
        raise UserError(f"cannot write the checkpoint {path}: {why}") from error
    ranks.barrier()
    if ranks.first:
        with replacing(path) as scratch:
            partial.rename(scratch)
            write_tensors(scratch / WEIGHTS, weights)
        _prune(folder, keep, state.best)
    ranks.barrier()


def _prune(folder: Path, keep: int, best: int) -> None:
    for path in list_checkpoints(folder)[:-keep]:
        if step_of(path) != best:
            remove(path)
    for unfinished in folder.glob(f".{_STEP}*"):  # of a run that was killed while it wrote
        remove(unfinished)


def load(folder: Path, step: int, engine: Engine) -> TrainState:
    """Restore weights, optimizer, schedule and random state from `folder`/step-N."""
    path = folder / f"{_STEP}{step:08d}"
    if not path.is_dir():
        raise UserError(f"no checkpoint {path}: it was removed while the run still needed it")
    state = engine.load(path)
    return TrainState(state["step"], state["tokens"], state.get("validations", []))


def resume(folder: Path, engine: Engine, ranks: Ranks) -> TrainState:
    """Restore the newest checkpoint that the first rank sees, if there is one."""
    paths = list_checkpoints(folder)
    newest = step_of(paths[-1]) if paths and ranks.first else 0
    step = int(ranks.sum(torch.tensor(newest)))  # the others add 0
    return load(folder, step, engine) if step else TrainState()


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """What `Engine.master_weights` returned when `checkpoint` was written."""
    path = checkpoint / WEIGHTS
    if not path.is_file():
        raise UserError(
            f"{checkpoint} has no {WEIGHTS}: version 0.1.0 wrote it; resume the run once with this version, or extract "
            "the head with that one"
        )
    return read_tensors(path)
