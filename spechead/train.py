"""Train a head on a target: one loop, read from top to bottom.

Knows nothing of any particular head, and nothing of DeepSpeed beyond `engine`.

Legend: B rows, T tokens, K depths.
"""

from __future__ import annotations

import math
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spechead import __version__, metrics
from spechead.adapter import FOLDER, Adapter
from spechead.dataset import (
    Batch,
    Sample,
    build_samples,
    collate,
    digest,
    draft_vocabulary,
    foreign_warning,
    plan_step,
    read_conversations,
    split_validation,
)
from spechead.engine import Engine, Group, Ranks, checkpoints, learning_rate_factor, start, step_of
from spechead.errors import UserError
from spechead.features import FeatureMemory
from spechead.files import held, read_json, refuse_unwritable, write_json
from spechead.formats.native import has_head, save_head
from spechead.heads import HEADS, Head
from spechead.heads.base import Hits, ahead
from spechead.log import NoLog, Progress, RunLog, plot_curve
from spechead.module import JointModule, TrainingModule
from spechead.recipe import Recipe
from spechead.standing import Standing
from spechead.target import Target, choose_device, native_bfloat16
from spechead.templates import template_warning, written_with
from spechead.tree import parse_plan
from spechead.warm_start import EarlierHead, other_target

STARTED, FINISHED, CHECKPOINTS = "recipe.json", "run.json", "checkpoints"
# what may change when a run is carried on
FREE_OPTIONS = ("log.", "out", "engine.threads", "engine.feature_memory_gb", "engine.gradient_checkpointing")


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
    dropped: dict[str, int]
    total: int
    device: torch.device


def train(recipe: Recipe, memory: FeatureMemory | None = None) -> Path:
    """Train as the recipe says and return the head's folder; goes on where an interrupted run of the same recipe was.

    `memory` may be shared by runs that tap the same layers of the same target for the same samples.
    """
    out = Path(recipe.out)
    if (out / FINISHED).is_file():
        _refuse_other(recipe.to_dict(), out)
        if not has_head(out / "head"):
            raise UserError(f"{out} holds a finished run without its head; `spechead extract-head {out}` makes it anew")
        print(f"{out} holds the finished run of this recipe; remove it to train anew")
        return out / "head"
    memory = memory or FeatureMemory(recipe.engine.feature_memory_gb)
    run = set_up(recipe, start(choose_device(recipe.target.device)), memory)
    with held(out, "out") if run.ranks.first else nullcontext():
        return finish(run, fit(run))


def set_up(recipe: Recipe, ranks: Ranks, memory: FeatureMemory) -> Run:
    """Seeds, target, data, head and engine."""
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    out = Path(recipe.out)
    refuse_unwritable(out)
    accumulation = recipe.optim.accumulation(ranks.world)
    device = choose_device(recipe.target.device)
    bf16 = _bf16(recipe.engine.precision, device)
    target = load_target(recipe, bf16)
    torch.manual_seed(recipe.seed)  # behind the loading, which may draw numbers
    random.seed(recipe.seed)
    training, validation, dropped = load_data(recipe, target, ranks)
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
    claim(recipe, out, ranks, facts)  # now that nothing is refused
    return Run(recipe, ranks, out, head, adapter, engine, training, validation, dropped, total, device)


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


def fit(run: Run) -> Standing:
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


def look(run: Run, now: Standing, log: RunLog | NoLog) -> None:
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


def save(run: Run, now: Standing) -> None:
    run.engine.save(run.out / CHECKPOINTS, now.step, asdict(now), run.ranks, run.recipe.log.keep, now.best)


def train_step(run: Run, now: Standing, window: Window) -> None:
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


def resume(run: Run) -> Standing:
    """Take up the newest checkpoint that the first rank sees, if there is any."""
    found = checkpoints(run.out / CHECKPOINTS)
    newest = step_of(found[-1]) if found and run.ranks.first else 0
    step = int(run.ranks.sum(torch.tensor(newest)))  # the others add 0
    if step == 0:
        return Standing()
    state = run.engine.load(run.out / CHECKPOINTS, step)
    return Standing(state["step"], state["tokens"], state.get("validations", []))


def claim(recipe: Recipe, out: Path, ranks: Ranks, facts: dict[str, Any]) -> None:
    """Note what the run in `out` is, or refuse to carry on with another recipe, target, data or number of processes."""
    path = out / STARTED
    mine = recipe.to_dict() | {"facts": facts | {"processes": ranks.world}}
    if checkpoints(out / CHECKPOINTS):
        _refuse_other(mine, out)
    ranks.barrier()
    if ranks.first:
        write_json(path, mine)


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


class Window:
    """Sums over the steps since the last log line."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._clear()

    def _clear(self) -> None:
        self._loss, self._supervised, self._tokens, self._seconds = 0.0, 0, 0, 0.0
        self._correct = torch.zeros(self._head.judged, dtype=torch.long)  # [K]
        self._rows = torch.zeros_like(self._correct)  # [K]: that have a token to draft
        self._passes = self._committed = self._outside = 0
        self._parts = torch.zeros(3, dtype=torch.float64)  # where head and target are trained: their losses, and tokens

    def add(self, loss: Tensor, hits: Hits, batch: Batch, parts: Tensor | None = None) -> None:
        supervised = int(batch.supervised.sum())
        self._loss += float(loss.detach())
        self._supervised += supervised
        if parts is not None:
            self._parts += torch.tensor([*parts.tolist(), supervised])
        self._outside += int((batch.supervised & ~self._head.to_draft(batch.ids)[1]).sum())
        self._tokens += int((batch.document >= 0).sum())
        self._correct += (hits.correct & hits.valid).sum((1, 2)).cpu()
        self._rows += torch.stack([(hits.valid & ahead(batch, 2 + k)[1]).sum() for k in range(len(self._rows))]).cpu()
        for row in range(hits.valid.shape[0]):
            passes, committed = metrics.walk(hits.correct[:, row], hits.valid[row])
            self._passes += passes
            self._committed += committed

    def took(self, seconds: float) -> None:
        """Time spent training; pauses for checkpoints and validation are left out."""
        self._seconds += seconds

    @property
    def note(self) -> str:
        loss = f"loss {self._loss / max(1, self._supervised):.2f}"
        apart = ", ".join(f"{name} {value:.2f}" for name, value in _apart(*self._parts.tolist()).items())
        length = self._committed / max(1, self._passes)
        return f"{loss}{f' ({apart})' if apart else ''}, {length:.2f} tokens/pass"

    def values(self, ranks: Ranks) -> dict[str, float]:
        """Loss per supervised token, accuracy by depth, the acceptance length they imply, and the rate; then anew.

        Where head and target are trained together, the loss of each as well. Beside these the share of supervised
        tokens that are outside the draft vocabulary: no draft can be right there.
        """
        counts = [self._supervised, self._outside, self._tokens, self._passes, self._committed]
        sums = torch.tensor([self._loss, *counts, *self._correct, *self._rows], dtype=torch.float64)
        loss, supervised, outside, tokens, passes, committed, *depths = ranks.sum(sums).tolist()
        hits, rows = depths[: len(depths) // 2], depths[len(depths) // 2 :]
        found = {"loss": loss / max(1, supervised)} | _apart(*ranks.sum(self._parts).tolist())
        found["acceptance_length"] = committed / max(1, passes)
        found["outside_vocabulary"] = outside / max(1, supervised)
        found |= {f"accuracy@{k + 1}": hit / max(1, n) for k, (hit, n) in enumerate(zip(hits, rows, strict=True))}
        if self._seconds:
            found["tokens_per_s"] = tokens / self._seconds
        self._clear()
        return found


def _apart(head: float, target: float, supervised: float) -> dict[str, float]:
    """The losses of head and target per supervised token, where both were trained."""
    return {"head_loss": head / supervised, "target_loss": target / supervised} if supervised else {}


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


def finish(run: Run, now: Standing) -> Path:
    """Write the head, the curve, and what the head came from."""
    step = settle(run, now)
    masters = run.engine.master_weights()
    folder = run.out / "head"
    if run.ranks.first:
        recipe = run.recipe
        write_head(recipe, step, run.head, run.adapter, masters, folder)
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


def settle(run: Run, now: Standing) -> int:
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


def head_weights(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors by its own names, out of those of `TrainingModule`."""
    return {name.removeprefix("head."): tensor for name, tensor in masters.items() if name.startswith("head.")}


def write_head(
    recipe: Recipe, step: int, head: Head, adapter: Adapter | None, masters: dict[str, Tensor], folder: Path
) -> None:
    """Write the head with the weights after `step`, and beside it the adapter that was trained with it.

    The head is then for the target that carries the adapter, and `head.target` becomes that one.
    """
    if adapter is None:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)  # of another run
    else:
        adapter.load([tensor for name, tensor in masters.items() if name.startswith("adapter_parameters.")])
        adapter.save(folder / FOLDER)
        head.target.fingerprint = adapter.fingerprint(head.target.fingerprint)
    save_head(head, folder, head_meta(recipe, step), head_weights(masters))


def head_meta(recipe: Recipe, steps: int) -> dict[str, Any]:
    """What a head's file says of the training behind it."""
    target = recipe.target
    split = {name: getattr(recipe.data, name) for name in ("max_length", "validation_share", "limit")}
    meta = {"data": recipe.data.train, "split": split | {"seed": recipe.seed}, "steps": steps}
    meta["template_kwargs"] = target.template_kwargs
    flags = {"four_bits": target.four_bits, "adapter": bool(recipe.adapter.peft)}
    return meta | {name: True for name, so in flags.items() if so}


def load_data(recipe: Recipe, target: Target, ranks: Ranks) -> tuple[list[Sample], list[Sample], dict[str, int]]:
    """Training and validation samples, and what was dropped and why."""
    sources, keywords = recipe.data.sources(), recipe.target.template_kwargs
    conversations = read_conversations(sources, recipe.data.limit)
    samples = build_samples(conversations, target.tokenizer, recipe.data.max_length, keywords)
    if ranks.first:
        for source in sources:
            if warning := template_warning(keywords, written_with(source), f"{source} was written"):
                print(f"data: {warning} (option target.template_kwargs)")
        for why, count in samples.dropped.items():
            print(f"data: {count} of {len(conversations)} conversations {why}")
        if warning := foreign_warning(conversations, target.name):
            print(f"data: {warning}; a head learns most from the target's own answers (spechead data synthesize)")
    training, validation = split_validation(samples.items, recipe.data.validation_share, recipe.seed)
    if not training:
        raise UserError(f"data.train {recipe.data.train}: no conversation is left to train on")
    return training, validation, samples.dropped


def bare_head(recipe: Recipe, target: Target) -> Head:
    """The recipe's head for the target, on the CPU, without vocabulary and weights that mean anything."""
    kind = HEADS[recipe.head.kind]
    head = kind(kind.Config(**recipe.head.options), target)
    if recipe.head.tree:
        head.tree = parse_plan(recipe.head.tree)
    return head


def make_head(recipe: Recipe, target: Target, training: Sequence[Sample]) -> Head:
    """A new head for the target: its draft vocabulary, and the weights that it starts from."""
    head = bare_head(recipe, target)
    earlier = EarlierHead(Path(recipe.head.init_from), head) if recipe.head.init_from else None
    kept = None if earlier is None else earlier.kept_ids(recipe.head.init_vocabulary)
    if head.reduced:
        head.set_vocabulary(draft_vocabulary(training, head.draft_size, target.vocab_size, kept))
    head.to(target.device)
    if recipe.engine.gradient_checkpointing:
        head.recompute = True
    if recipe.head.init_from_target:
        head.init_from_target()
    if earlier is not None:
        earlier.hand_over()
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


def _bf16(precision: str, device: torch.device) -> bool:
    return precision == "bf16" or (precision == "auto" and native_bfloat16(device))


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


def _refuse_other(mine: dict[str, Any], out: Path) -> None:
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
