"""The training engine: DeepSpeed around one ordinary module, for one process or many, on CPUs (gloo) or GPUs (nccl).

The only file that touches deepspeed and torch.distributed. Knows nothing of heads, data or recipes beyond numbers.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spechead.errors import UserError, first_line
from spechead.files import flush, make_folder, reason
from spechead.training.ema import AVERAGE, averages, keep_average

_STEP = "step-"


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` (on the CPU) over all ranks; the group may only know the accelerator."""
        if self.world == 1:
            return values
        there = values.to(self.device)
        dist.all_reduce(there)
        return there.cpu()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def start(device: torch.device) -> Ranks:
    """Join the processes of torchrun; alone, fill in what torchrun would have set.

    A second run joins the same group.
    """
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), device)
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    _quieten(device)
    import deepspeed
    import deepspeed.ops

    # On a CPU DeepSpeed would compile a shared-memory transport with g++; gloo does the same work without a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )
    atexit.register(dist.destroy_process_group)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def learning_rate_factor(schedule: str, total: int, warmup_share: float, floor: float) -> Callable[[int], float]:
    """step -> share of the peak rate.

    Linear warm-up, then cosine, linear or constant down to `floor` at the last step.
    """
    warmup = round(total * warmup_share)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
        falling = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
        return floor + (1 - floor) * falling

    return factor


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate: `lr` at its peak, times `factor(step)`."""

    parameters: list[nn.Parameter]
    lr: float
    factor: Callable[[int], float]


class Engine:
    """One module under DeepSpeed: forward, backward, step, and checkpoints that resume bit-exactly.

    `groups` hold the module's trainable parameters, in its order. `lr` is the first group's. `ema`: the decay of the
    average that is kept of the weights, 0 for none.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        ema: float,
        clip_norm: float,
        micro_batch: int,
        accumulation: int,
        zero_stage: int,
        bf16: bool,
    ) -> None:
        import deepspeed

        parts: list[dict[str, Any]] = [
            {"params": [p for p in g.parameters if p.requires_grad], "lr": g.lr} for g in groups
        ]
        self._masters = torch.optim.AdamW(parts, betas=betas, weight_decay=weight_decay, fused=True)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[parameter for part in parts for parameter in part["params"]],
            optimizer=self._masters,
            lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, [g.factor for g in groups]),
            config={
                "train_micro_batch_size_per_gpu": micro_batch,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": clip_norm,
                "zero_optimization": {"stage": zero_stage},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": bf16},
                "steps_per_print": 1 << 40,
            },
        )
        self._masters.register_step_post_hook(_not_begun)
        if ema:  # only now, since DeepSpeed may take a step that moves nothing
            keep_average(self._masters, ema)
        self.module, self.accumulation, self._ema = module, accumulation, ema
        self.lr = self.grad_norm = math.nan  # of the last step
        self._untold_norm = zero_stage == 0 and not bf16  # DeepSpeed clips there without telling the norm

    def __call__(self, *inputs: Any) -> Any:
        return self._engine(*inputs)

    def train(self, mode: bool) -> None:
        self._engine.train(mode)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`: the sum over ranks and micro steps is what the optimizer sees.

        DeepSpeed divides by both counts, which is undone here, so that a loss divided by the global number of
        supervised tokens stays divided by that alone.
        """
        self._engine.backward(loss * (self.accumulation * self._engine.dp_world_size))

    def step(self) -> None:
        """After each backward; the optimizer moves when the accumulation is complete."""
        self.lr = float(self._engine.get_lr()[0])
        if self._untold_norm and self._engine.is_gradient_accumulation_boundary():
            grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self.grad_norm = float(nn.utils.get_total_norm(grads))
        self._engine.step()
        told = self._engine.get_global_grad_norm()
        if told is not None:
            self.grad_norm = float(told)

    @property
    def skipped(self) -> int:
        """Steps that DeepSpeed left out because a gradient was not finite."""
        return int(self._engine.skipped_steps)

    def master_weights(self) -> dict[str, Tensor]:
        """float32 masters of every parameter, averaged where an average is kept, and the buffers.

        Collective: every rank must call it.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        state = dict(self.module.named_buffers())
        held = self._stage_0_masters()
        with averages(self._masters):
            for name, parameter in self.module.named_parameters():
                master = held.get(id(parameter))
                master = safe_get_full_fp32_param(parameter) if master is None else master
                state[name] = (parameter if master is None else master).detach().float().cpu().clone()
        return state

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the module computes with the averaged weights, where an average is kept. Collective."""
        if not self._ema:
            yield
            return
        weights, own = self.master_weights(), {}
        for name, parameter in self.module.named_parameters():
            own[name] = parameter.detach().clone()
            parameter.data.copy_(weights[name])
        try:
            yield
        finally:
            for name, parameter in self.module.named_parameters():
                parameter.data.copy_(own[name])

    def _stage_0_masters(self) -> dict[int, Tensor]:
        """bf16 without ZeRO keeps its masters in lists beside the parameters, where the accessor does not look."""
        optimizer = self._engine.optimizer
        low, full = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
        pairs = [pair for group in zip(low, full, strict=True) for pair in zip(*group, strict=True)]
        return {id(parameter): master for parameter, master in pairs}

    def save(self, folder: Path, step: int, state: dict[str, Any], ranks: Ranks, keep: int, best: int) -> None:
        """Write `folder`/step-N whole or not at all, then forget all but the newest `keep` and that of step `best`."""
        name, scratch = f"{_STEP}{step:08d}", f".{_STEP}{step:08d}.tmp"
        make_folder(folder)
        client = state | {"rng": torch.get_rng_state(), "python_rng": random.getstate()}
        try:
            self._engine.save_checkpoint(
                str(folder),
                tag=scratch,
                client_state=client,
                save_latest=False,
                exclude_frozen_parameters=True,
            )
            flush(folder / scratch)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(folder / scratch, ignore_errors=True)
            why = reason(error) if isinstance(error, OSError) else first_line(error)
            raise UserError(f"cannot write the checkpoint {folder / name}: {why}") from error
        ranks.barrier()
        if ranks.first:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / scratch).rename(folder / name)
            for old in checkpoints(folder)[:-keep]:
                if step_of(old) != best:
                    shutil.rmtree(old)
        ranks.barrier()

    def load(self, folder: Path, step: int) -> dict[str, Any]:
        """Weights, optimizer, schedule and random state of `folder`/step-N; returns the state that `save` was given."""
        name = f"{_STEP}{step:08d}"
        if not (folder / name).is_dir():
            raise UserError(f"no checkpoint {folder / name}: it was removed while the run still needed it")
        try:
            _, client = self._engine.load_checkpoint(str(folder), tag=name)
        except (OSError, RuntimeError, EOFError, UnpicklingError, AssertionError, KeyError) as error:
            raise UserError(
                f"cannot read the checkpoint {folder / name}: it is damaged, or of another version; remove it, and the "
                "run goes on from the one before"
            ) from error
        torch.set_rng_state(client["rng"])
        random.setstate(client["python_rng"])
        return client


def _not_begun(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A group at a rate of 0 has taken no step: the first it takes must be corrected as a first one is."""
    for group in optimizer.param_groups:
        for master in group["params"] if not group["lr"] else ():
            if "step" in optimizer.state[master]:
                optimizer.state[master]["step"].zero_()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = folder.glob(f"{_STEP}*") if folder.is_dir() else ()
    return sorted(path for path in found if path.is_dir() and path.name.removeprefix(_STEP).isdecimal())


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_STEP))


def saved_masters(checkpoint: Path) -> dict[str, Tensor]:
    """What `Engine.master_weights` gave when `checkpoint` was written, on the CPU.

    One process reads it, without an engine, however many wrote it. Raises UserError where a file is missing, cannot be
    read, or holds more than tensors and DeepSpeed's own records.
    """
    model = _read(checkpoint / "mp_rank_00_model_states.pt")
    state: dict[str, Tensor] = dict(model["module"])
    trained = [name for name in state if name not in model["buffer_names"]]  # in the order of the parameters
    if model["ds_config"]["zero_optimization"]["stage"]:
        masters = _joined(_shards(checkpoint, model["dp_world_size"]))
    elif model["ds_config"]["bf16"]["enabled"]:  # lists without names, in the order of the parameters
        optimizer = model["optimizer"]["optimizer_state_dict"]
        masters = dict(zip(trained, _averaged(optimizer, chain(*model["optimizer"]["fp32_groups"])), strict=True))
    else:
        masters = dict(zip(trained, _averaged(model["optimizer"], [state[name] for name in trained]), strict=True))
    return state | {name: masters[name].view(state[name].shape) for name in trained}


def _shards(checkpoint: Path, world: int) -> list[dict[str, Any]]:
    """The optimizer states of ranks 0, 1, ...; each rank of a ZeRO run wrote its own part of the masters."""
    _quieten(torch.device("cpu"))
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    files = [list(checkpoint.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")) for rank in range(world)]
    missing = [str(rank) for rank, found in enumerate(files) if not found]
    if missing:
        raise UserError(
            f"{checkpoint} lacks what rank(s) {', '.join(missing)} of {world} wrote: "
            "copy the files from the machines that they ran on"
        )
    records = [fragment_address, LossScaler, ZeroStageEnum]
    return [_read(found[0], records)["optimizer_state_dict"] for found in files]


def _joined(shards: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Flat masters by name. Each rank holds a run of each group's masters laid end to end, cut anywhere."""
    pieces: dict[str, list[Tensor]] = {}
    for shard in shards:
        flats = _averaged(shard["base_optimizer_state"], shard["single_partition_of_fp32_groups"])
        for flat, places in zip(flats, shard["param_slice_mappings"], strict=True):
            for name, place in places.items():
                pieces.setdefault(name, []).append(flat[place.start : place.start + place.numel])
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _averaged(optimizer: dict[str, Any], masters: Iterable[Tensor]) -> list[Tensor]:
    """Of each master its average, where the optimizer's saved state holds one."""
    states = optimizer["state"]  # by number, in the order of the masters
    return [states.get(number, {}).get(AVERAGE, master) for number, master in enumerate(masters)]


def _read(path: Path, records: Sequence[type] = ()) -> dict[str, Any]:
    """The file's content; of classes, only `records` are let in, since a pickle may run anything.

    Only what is looked at comes into memory: the moments of the optimizer are twice as large as the masters.
    """
    try:
        with torch.serialization.safe_globals(list(records)):
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:  # a file cut short raises any of them
        raise UserError(f"cannot read {path}: it is damaged, or no checkpoint that spechead wrote") from error
    return content


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quieten(device: torch.device) -> None:
    """DeepSpeed tells everything it does; errors are enough."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "ERROR")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
