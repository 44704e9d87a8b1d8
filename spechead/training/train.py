"""Train a head on a target: one loop, read from top to bottom.

Knows nothing of any particular head, and nothing of DeepSpeed beyond `engine`.
"""

from __future__ import annotations

import math
import platform
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from spechead import __version__
from spechead.data.dataset import Batch, Sample, collate, digest, plan_step
from spechead.errors import UserError
from spechead.files import locked, refuse_unwritable, write_json
from spechead.heads import Head
from spechead.heads.files import has_head
from spechead.progress import Progress
from spechead.target.adapter import Adapter
from spechead.target.loading import choose_device
from spechead.training.build import computes_bf16, load_data, load_target, make_head
from spechead.training.engine import Engine, Group, Ranks, checkpoints, learning_rate_factor, start, step_of
from spechead.training.feature_cache import FeatureCache
from spechead.training.init_from import other_target
from spechead.training.log import NoLog, RunLog, plot_curve
from spechead.training.module import JointModule, TrainingModule
from spechead.training.recipe import Recipe
from spechead.training.run_folder import CHECKPOINTS, FINISHED, claim, head_meta, refuse_other, write_head
from spechead.training.running_metrics import Window
from spechead.training.state import TrainState


@dataclass
class Run:
    """Everything a run needs, built once."""

    recipe: Recipe
    ranks: Ranks
    out: Path
    head: Head
    adapter: Adapter | None
    engine: Engine
    training: list[Sample]
    validation: list[Sample]
    dropped: dict[str, int]  # see `build.Data`, as of the next
    foreign: str
    total: int
    device: torch.device


def train(recipe: Recipe, memory: FeatureCache | None = None) -> Path:
    """Train as the recipe says and return the head's folder; goes on where an interrupted run of the same recipe was.

    `memory` may be shared by runs that tap the same layers of the same target for the same samples.
    """
    out = Path(recipe.out)
    if (out / FINISHED).is_file():
        refuse_other(recipe.to_dict(), out)
        if not has_head(out / "head"):
            remedy = f"make it with `spechead extract-head {out} --out {out}/head`"
            raise UserError(f"{out} lacks the head of its run: {remedy}")
        print(f"{out} holds the finished run of this recipe; remove it to train anew")
        return out / "head"
    memory = memory or FeatureCache(recipe.engine.feature_memory_gb)
    run = set_up(recipe, start(choose_device(recipe.target.device)), memory)
    with locked(out, "out") if run.ranks.first else nullcontext():
        return finish(run, fit(run))


def set_up(recipe: Recipe, ranks: Ranks, memory: FeatureCache) -> Run:
    """Seeds, target, data, head and engine."""
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    out = Path(recipe.out)
    refuse_unwritable(out)
    accumulation = recipe.optim.accumulation(ranks.world)
    device = choose_device(recipe.target.device)
    bf16 = computes_bf16(recipe.engine.precision, device)
    target = load_target(recipe, bf16)
    torch.manual_seed(recipe.seed)  # behind the loading, which may draw numbers
    random.seed(recipe.seed)
    training, validation, dropped, foreign = load_data(recipe, target, ranks)
    total = recipe.optim.total_steps(len(training))
    refuse_idle_patience(recipe, total, len(validation))
    head = make_head(recipe, target, training)
    if ranks.first and recipe.head.init_from and (warning := other_target(Path(recipe.head.init_from), target)):
        print(f"warning: {warning}", file=sys.stderr)
    adapter = target.adapt(recipe.adapter.peft) if recipe.adapter.peft else None
    if adapter is None:
        target.pack()
    optim = recipe.optim
    engine = Engine(
        TrainingModule(head, memory) if adapter is None else JointModule(head, memory, adapter, recipe.adapter),
        groups(recipe, total, head, adapter),
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        ema=optim.ema,
        clip_norm=optim.clip_norm,
        micro_batch=optim.micro_batch_size,
        accumulation=accumulation,
        zero_stage=recipe.engine.zero_stage,
        bf16=bf16,
    )
    facts = {"target": target.fingerprint, "samples": len(training), "data": digest([*training, *validation])}
    facts["foreign"] = foreign
    claim(recipe, out, ranks, facts)  # now that nothing is refused
    return Run(recipe, ranks, out, head, adapter, engine, training, validation, dropped, foreign, total, device)


def refuse_idle_patience(recipe: Recipe, total: int, held_out: int) -> None:
    """`optim.patience` needs validations before the last step."""
    patience, every = recipe.optim.patience, recipe.log.validate_every
    if patience and not (held_out and 0 < every < total):
        raise UserError(
            f"option optim.patience: {patience} counts validations, and none comes before the end, with {held_out} "
            f"held-out samples and log.validate_every {every} of {total} steps: set it to 0, or change them"
        )


def groups(recipe: Recipe, total: int, head: Head, adapter: Adapter | None) -> list[Group]:
    """Head and adapter with their learning rates; the adapter's is 0 while the head is trained alone."""
    optim = recipe.optim

    def factor(steps: int) -> Callable[[int], float]:
        return learning_rate_factor(optim.schedule, steps, optim.warmup_share, optim.min_lr_share)

    found = [Group(list(head.parameters()), optim.lr, factor(total))]
    if adapter is not None:
        alone = steps_alone(recipe, total)
        later = factor(total - alone)
        rate = Group(adapter.parameters, recipe.adapter.lr, lambda step: later(step - alone) if step >= alone else 0.0)
        found.append(rate)
    return found


def steps_alone(recipe: Recipe, total: int) -> int:
    """Steps that train the head alone, before an adapter is trained with it; 0 without one."""
    return min(total - 1, round(recipe.adapter.start_share * total)) if recipe.adapter.peft else 0


def progress_of(run: Run, step: int) -> float:
    """The share of the steps that train head and adapter together that is behind before `step`; below 0 until then."""
    alone = steps_alone(run.recipe, run.total)
    return (step - 1 - alone) / (run.total - alone)


def fit(run: Run) -> TrainState:
    """The loop: train a step, then log, checkpoint and validate where that is due.

    It ends after the last step, or when validations bring nothing better. A checkpoint comes before a validation, so
    that one which dies costs nothing, and again behind the best so far: the head may be made of it.
    """
    every, patience = run.recipe.log, run.recipe.optim.patience
    now = resume(run)
    log = open_log(run, now.step)
    window = Window(run.head)
    with Progress("train", run.total, "step", done=now.step, quiet=not run.ranks.first) as progress:
        if now.step and now.step not in dict(now.validations):  # the run ended between checkpoint and validation
            look(run, now, log)
        while now.step < run.total and not now.over(patience):
            train_step(run, now, window)
            progress.advance(note=window.note)
            if _due(now.step, every.every, run.total) or _due(now.step, every.validate_every, run.total):
                engine = run.engine
                rates = {"lr": engine.lr, "grad_norm": engine.grad_norm, "tokens": now.tokens}
                log.record(now.step, window.values(run.ranks) | rates)
            if _due(now.step, every.checkpoint_every, run.total):
                save(run, now)
            look(run, now, log)
    log.close()
    return now


def look(run: Run, now: TrainState, log: RunLog | NoLog) -> None:
    """Validate where that is due, and write a checkpoint of what is the best so far, or the end of the run."""
    if not run.validation or not _due(now.step, run.recipe.log.validate_every, run.total):
        return
    found = validate(run, now.step)
    log.record(now.step, {f"validation/{name}": value for name, value in found.items()})
    if now.step <= steps_alone(run.recipe, run.total):  # it is another target's head
        return
    now.validations.append((now.step, found["acceptance_length"]))
    if now.best == now.step or now.step == run.total or now.over(run.recipe.optim.patience):
        save(run, now)


def save(run: Run, now: TrainState) -> None:
    run.engine.save(run.out / CHECKPOINTS, now.step, asdict(now), run.ranks, run.recipe.log.keep, now.best)


def train_step(run: Run, now: TrainState, window: Window) -> None:
    """One optimizer step: plan its samples, take them forward and backward in micro steps, move the weights."""
    began, step = time.monotonic(), now.step + 1
    batches = micro_batches(run, step)
    if run.adapter is not None:  # dropout is the same after a resume, and another on each rank
        torch.manual_seed((run.recipe.seed * run.total + step) * run.ranks.world + run.ranks.rank)
    supervised = int(run.ranks.sum(torch.tensor(sum(int(b.supervised.sum()) for b in batches))))
    for batch in batches:
        loss, hits, parts = run.engine(batch, progress_of(run, step))
        _refuse_not_finite(loss, step, batch, run.head)
        run.engine.backward(loss / supervised)
        run.engine.step()
        window.add(loss, hits, batch, parts)
    _refuse_skipped(run.engine, step)
    now.step, now.tokens = step, now.tokens + supervised
    window.took(time.monotonic() - began)


def resume(run: Run) -> TrainState:
    """Take up the newest checkpoint that the first rank sees, if there is any."""
    found = checkpoints(run.out / CHECKPOINTS)
    newest = step_of(found[-1]) if found and run.ranks.first else 0
    step = int(run.ranks.sum(torch.tensor(newest)))  # the others add 0
    if step == 0:
        return TrainState()
    state = run.engine.load(run.out / CHECKPOINTS, step)
    return TrainState(state["step"], state["tokens"], state.get("validations", []))


def open_log(run: Run, step: int) -> RunLog | NoLog:
    """The log of this process, carried on behind `step`."""
    if not run.ranks.first:
        return NoLog()
    where = run.recipe.log
    return RunLog(run.out, where.wandb, where.project, run.recipe.to_dict(), resume=step)


def micro_batches(run: Run, step: int) -> list[Batch]:
    """This rank's share of the step's samples. The samples depend on the step and the seed alone, not on the ranks."""
    optim, ranks = run.recipe.optim, run.ranks
    chosen = plan_step(len(run.training), optim.batch_size, run.recipe.seed, step - 1)
    mine = chosen[ranks.rank :: ranks.world]
    size = optim.micro_batch_size
    parts = [mine[i : i + size] for i in range(0, len(mine), size)]
    length = run.recipe.data.max_length
    return [collate([run.training[i] for i in part], length).to(run.device) for part in parts]


@torch.no_grad()
def validate(run: Run, step: int) -> dict[str, float]:
    """The window's numbers over the held-out samples, with the averaged weights where the recipe keeps them."""
    run.engine.train(False)
    window = Window(run.head)
    with run.engine.averaged():
        for sample in run.validation[run.ranks.rank :: run.ranks.world]:
            batch = collate([sample], run.recipe.data.max_length).to(run.device)
            loss, hits, parts = run.engine.module(batch, progress_of(run, step))
            window.add(loss, hits, batch, parts)
    run.engine.train(True)
    found = window.values(run.ranks)
    if not math.isfinite(found["loss"]):
        raise UserError(f"step {step}: the loss of the validation is {found['loss']}; lower optim.lr")
    return found


def finish(run: Run, now: TrainState) -> Path:
    """Write the head, the curve, and what the head came from."""
    step = settle(run, now)
    masters = run.engine.master_weights()
    folder = run.out / "head"
    if run.ranks.first:
        recipe = run.recipe
        write_head(head_meta(recipe, step, run.foreign), run.head, run.adapter, masters, folder)
        plot_curve(run.out)
        provenance = {
            "recipe": recipe.to_dict(),
            "steps": {"trained": now.step, "head": step},
            "samples": {"training": len(run.training), "validation": len(run.validation), "dropped": run.dropped},
            "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")},
            "machine": f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads",
        }
        write_json(run.out / FINISHED, provenance | {"spechead": __version__})
    run.ranks.barrier()
    return folder


def settle(run: Run, now: TrainState) -> int:
    """Go back to the weights that validated best, unless they are the last or not asked for; the step they are of."""
    if run.ranks.first and now.step < run.total:
        print(f"stopped after step {now.step}: {run.recipe.optim.patience} validations brought nothing better")
    if not run.recipe.log.best or now.best in (0, now.step):
        return now.step
    run.engine.load(run.out / CHECKPOINTS, now.best)
    if run.ranks.first:
        length = dict(now.validations)[now.best]
        print(f"the head is that of step {now.best}, which validated best: {length:.2f} tokens per pass")
    return now.best


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _refuse_not_finite(loss: Tensor, step: int, batch: Batch, head: Head) -> None:
    if torch.isfinite(loss):
        return
    bad = [name for name, p in head.named_parameters() if not torch.isfinite(p).all()]
    where = f"parameter {bad[0]}" if bad else "an activation"
    raise UserError(
        f"step {step}: the loss is {float(loss.detach())} on conversation(s) {batch.rows}; "
        f"the first bad tensor is {where}. "
        "Lower optim.lr, or look at the conversation with `spechead data inspect`"
    )


def _refuse_skipped(engine: Engine, step: int) -> None:
    if engine.skipped or not math.isfinite(engine.grad_norm):  # before it gets into a checkpoint
        raise UserError(f"step {step}: a gradient is not finite; lower optim.lr or engine.precision")
