"""Train a head on a target: one loop, read from top to bottom."""

from __future__ import annotations

import math
import platform
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead import __version__
from spechead.data.dataset import Batch, collate, digest, plan_step
from spechead.errors import UserError
from spechead.files import locked, read_json, refuse_unwritable, write_json
from spechead.heads.files import has_head
from spechead.heads.init_from import target_warning
from spechead.progress import Progress
from spechead.target.loading import choose_device
from spechead.training import checkpoints
from spechead.training.build import Data, computes_bf16, load_data, load_target, make_module
from spechead.training.checkpoints import TrainState
from spechead.training.distributed import Ranks, start
from spechead.training.engine import Engine
from spechead.training.log import NoLog, RunLog, plot_curve
from spechead.training.module import FeatureCache, TrainingModule
from spechead.training.recipe import Recipe
from spechead.training.run_folder import (
    CHECKPOINTS,
    FINISHED,
    claim_run,
    head_meta,
    refuse_other_recipe,
    settle_date,
    write_head,
)
from spechead.training.running_metrics import RunningMetrics


@dataclass
class Run:
    """Everything a run needs, built once."""

    recipe: Recipe
    ranks: Ranks
    out: Path
    data: Data
    module: TrainingModule
    engine: Engine
    total: int  # optimizer steps


def train(recipe: Recipe) -> Path:
    """Train as the recipe describes and return the head's folder; an interrupted run of the same recipe is resumed."""
    out = Path(recipe.out)
    if (out / FINISHED).is_file():
        refuse_other_recipe(recipe, out)
        if not has_head(out / "head"):
            step = read_json(out / FINISHED)["steps"]["head"]
            remedy = f"write it with `spechead extract-head {out} --step {step} --out {out}/head`"
            raise UserError(f"option out: {out} has no head although its run is finished, {remedy}")
        print(f"{out} contains the finished run of this recipe; remove it to train anew")
        return out / "head"
    ranks = start(choose_device(recipe.target.device))
    settle_date(recipe, out, ranks)
    run = set_up(recipe, ranks, FeatureCache(recipe.engine.feature_memory_gb))
    with locked(out, "out") if ranks.first else nullcontext():
        claim_run(recipe, out, ranks, facts(run))
        return finish(run, fit(run))


def set_up(recipe: Recipe, ranks: Ranks, cache: FeatureCache) -> Run:
    """Seeds, target, data, module and engine.

    `cache` may be shared by runs that tap the same layers of the same target on the same samples.
    """
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    out, optim = Path(recipe.out), recipe.optim
    refuse_unwritable(out)
    accumulation = optim.accumulation(ranks.world)
    bf16 = computes_bf16(recipe.engine.precision, ranks.device)
    target = load_target(recipe, bf16)
    torch.manual_seed(recipe.seed)  # after loading, which may draw random numbers
    random.seed(recipe.seed)
    data = load_data(recipe, target, ranks)
    total = optim.total_steps(len(data.training))
    refuse_idle_patience(recipe, total, len(data.validation))
    module = make_module(recipe, target, data.training, cache, total)
    if ranks.first and recipe.head.init_from and (warning := target_warning(Path(recipe.head.init_from), target)):
        print(f"warning: {warning}", file=sys.stderr)
    engine = Engine(
        module,
        module.groups(optim, total),
        optim,
        accumulation=accumulation,
        zero_stage=recipe.engine.zero_stage,
        bf16=bf16,
    )
    return Run(recipe, ranks, out, data, module, engine, total)


def facts(run: Run) -> dict[str, Any]:
    """What identifies the target and the data of a run: see `run_folder.claim_run`."""
    data = run.data
    identity = {"target": run.module.head.target.fingerprint, "samples": len(data.training)}
    return identity | {"data": digest(chain(data.training, data.validation)), "foreign": data.foreign}


def refuse_idle_patience(recipe: Recipe, total: int, held_out: int) -> None:
    """Raise UserError where `optim.patience` counts validations and none comes before the last step."""
    patience, every = recipe.optim.patience, recipe.log.validate_every
    if patience and not (held_out and 0 < every < total):
        raise UserError(
            f"option optim.patience: {patience} counts validations, and none comes before the end, with {held_out} "
            f"held-out samples and log.validate_every {every} of {total} steps: set it to 0, or change them"
        )


def fit(run: Run) -> TrainState:
    """The loop: take a step, then log, save a checkpoint and validate where that is due.

    It ends after the last step, or when `optim.patience` runs out. A checkpoint comes before a validation, so that a
    validation that fails costs nothing, and another after the best one so far: the head may be made from it.
    """
    options, patience = run.recipe.log, run.recipe.optim.patience
    state = checkpoints.resume(run.out / CHECKPOINTS, run.engine, run.ranks)
    log: RunLog | NoLog = NoLog()
    if run.ranks.first:
        log = RunLog(run.out, options.wandb, options.project, run.recipe.to_dict(), resume=state.step)
    metrics = RunningMetrics(run.module.head, run.module.parts)
    with Progress("train", run.total, "step", done=state.step, quiet=not run.ranks.first) as progress:
        if state.step and state.step not in dict(state.validations):  # interrupted between checkpoint and validation
            validate_if_due(run, state, log)
        while state.step < run.total and not state.should_stop(patience):
            train_step(run, state, metrics)
            progress.advance(note=metrics.note)
            if _due(state.step, options.every, run.total) or _due(state.step, options.validate_every, run.total):
                rates = {"lr": run.engine.lr, "grad_norm": run.engine.grad_norm, "tokens": state.tokens}
                log.record(state.step, metrics.values(run.ranks) | rates)
            if _due(state.step, options.checkpoint_every, run.total):
                save(run, state)
            validate_if_due(run, state, log)
    log.close()
    return state


def validate_if_due(run: Run, state: TrainState, log: RunLog | NoLog) -> None:
    """Validate where that is due, and save a checkpoint of the best validation so far and of the end of the run."""
    if not run.data.validation or not _due(state.step, run.recipe.log.validate_every, run.total):
        return
    values = validate(run, state.step)
    log.record(state.step, {f"validation/{name}": value for name, value in values.items()})
    if not run.module.comparable(state.step):
        return
    state.validations.append((state.step, values["acceptance_length"]))
    if state.best == state.step or state.step == run.total or state.should_stop(run.recipe.optim.patience):
        save(run, state)


def save(run: Run, state: TrainState) -> None:
    checkpoints.save(run.out / CHECKPOINTS, state, run.engine, run.ranks, run.recipe.log.keep)


def train_step(run: Run, state: TrainState, metrics: RunningMetrics) -> None:
    """One optimizer step: choose its samples, run them forward and backward in micro steps, update the weights."""
    began, step = time.monotonic(), state.step + 1
    batches = micro_batches(run, step)
    run.module.seed_dropout((run.recipe.seed * run.total + step) * run.ranks.world + run.ranks.rank)
    supervised = int(run.ranks.sum(torch.tensor(sum(int(b.supervised.sum()) for b in batches))))
    for batch in batches:
        output = run.engine(batch, step)
        _refuse_not_finite(output.loss, step, batch, run)
        run.engine.backward(output.loss / supervised)
        run.engine.step()
        metrics.add(output, batch)
    _refuse_skipped(run.engine, step)
    state.step, state.tokens = step, state.tokens + supervised
    metrics.add_seconds(time.monotonic() - began)


def micro_batches(run: Run, step: int) -> list[Batch]:
    """This rank's share of the step's samples. The samples depend on the step and the seed alone, not on the ranks."""
    optim, ranks = run.recipe.optim, run.ranks
    samples = plan_step(len(run.data.training), optim.batch_size, run.recipe.seed, step - 1)
    own = samples[ranks.rank :: ranks.world]
    size = optim.micro_batch_size
    parts = [own[i : i + size] for i in range(0, len(own), size)]
    length = run.recipe.data.max_length
    return [collate([run.data.training[i] for i in part], length).to(ranks.device) for part in parts]


@torch.no_grad()
def validate(run: Run, step: int) -> dict[str, float]:
    """The metrics of the held-out samples, with the averaged weights where the recipe keeps them."""
    run.engine.train(False)
    metrics = RunningMetrics(run.module.head, run.module.parts)
    with run.engine.averaged():
        for sample in run.data.validation[run.ranks.rank :: run.ranks.world]:
            batch = collate([sample], run.recipe.data.max_length).to(run.ranks.device)
            metrics.add(run.module(batch, step), batch)
    run.engine.train(True)
    values = metrics.values(run.ranks)
    if not math.isfinite(values["loss"]):
        raise UserError(f"step {step}: the loss of the validation is {values['loss']}; lower optim.lr")
    return values


def finish(run: Run, state: TrainState) -> Path:
    """Write the head, the curve of the log, and run.json: how the head was made."""
    step = restore_best(run, state)
    masters = run.engine.master_weights()
    folder, data = run.out / "head", run.data
    if run.ranks.first:
        meta = head_meta(run.recipe, step, data.foreign, run.module.head.target.chat)
        write_head(meta, run.module.head, run.module.adapter, masters, folder)
        plot_curve(run.out)
        provenance = {
            "recipe": run.recipe.to_dict(),
            "steps": {"trained": state.step, "head": step},
            "samples": {"training": len(data.training), "validation": len(data.validation), "dropped": data.dropped},
            "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")},
            "machine": f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads",
        }
        write_json(run.out / FINISHED, provenance | {"spechead": __version__})
        print(f"head: {folder}\nmeasure it:  spechead eval --head {folder}")
    run.ranks.barrier()
    return folder


def restore_best(run: Run, state: TrainState) -> int:
    """Load the checkpoint of the best validation unless it is the last step or `log.best` is off; returns its step."""
    if run.ranks.first and state.step < run.total:
        print(f"stopped after step {state.step}: {run.recipe.optim.patience} validations without improvement")
    if not run.recipe.log.best or state.best in (0, state.step):
        return state.step
    checkpoints.load(run.out / CHECKPOINTS, state.best, run.engine)
    if run.ranks.first:
        length = dict(state.validations)[state.best]
        print(f"the head is that of step {state.best}, the best validation: {length:.2f} tokens per pass")
    return state.best


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _refuse_not_finite(loss: Tensor, step: int, batch: Batch, run: Run) -> None:
    if torch.isfinite(loss):
        return
    bad = [name for name, p in run.module.head.named_parameters() if not torch.isfinite(p).all()]
    where = f"parameter {bad[0]}" if bad else "an activation"
    places = ", ".join(map(run.data.place, batch.rows))
    raise UserError(
        f"step {step}: the loss is {float(loss.detach())} on the conversation(s) {places}; "
        f"the first tensor that is not finite is {where}. "
        "Lower optim.lr, or look at the conversation with `spechead data inspect`"
    )


def _refuse_skipped(engine: Engine, step: int) -> None:
    if engine.skipped or not math.isfinite(engine.grad_norm):  # before it reaches a checkpoint
        raise UserError(f"step {step}: a gradient is not finite; lower optim.lr or engine.precision")
