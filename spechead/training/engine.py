"""The training engine: DeepSpeed around one ordinary module, for one process or many, on CPUs or GPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from spechead.errors import UserError
from spechead.files import flush
from spechead.training.ema import averages, keep_average
from spechead.training.recipe import OptimConfig


def learning_rate_factor(schedule: str, total: int, warmup_share: float, floor: float) -> Callable[[int], float]:
    """A function from the step to the share of the peak rate.

    Linear warm-up, then cosine or linear decay to `floor` at the last step, or constant.
    """
    warmup = round(total * warmup_share)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
        decay = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
        return floor + (1 - floor) * decay

    return factor


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate: the peak `lr` times `factor(step)`."""

    parameters: list[nn.Parameter]
    lr: float
    factor: Callable[[int], float]


class Engine:
    """One module under DeepSpeed: forward, backward, step, and checkpoints that resume bit-exactly.

    `groups` contain the module's trainable parameters, in its order; the attribute `lr` is the first group's rate.
    `accumulation`: micro steps of an optimizer step.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        optim: OptimConfig,
        *,
        accumulation: int,
        zero_stage: int,
        bf16: bool,
    ) -> None:
        import deepspeed

        parts: list[dict[str, Any]] = [
            {"params": [p for p in g.parameters if p.requires_grad], "lr": g.lr} for g in groups
        ]
        self._masters = torch.optim.AdamW(parts, betas=optim.betas, weight_decay=optim.weight_decay, fused=True)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[parameter for part in parts for parameter in part["params"]],
            optimizer=self._masters,
            lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, [g.factor for g in groups]),
            config={
                "train_micro_batch_size_per_gpu": optim.micro_batch_size,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": optim.clip_norm,
                "zero_optimization": {"stage": zero_stage},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": bf16},
                "steps_per_print": 1 << 40,
            },
        )
        self._masters.register_step_post_hook(_not_begun)
        if optim.ema:  # only now, since DeepSpeed's initialisation may take a step that moves nothing
            keep_average(self._masters, optim.ema)
        self.module, self.accumulation, self._ema = module, accumulation, optim.ema
        self.lr = self.grad_norm = math.nan  # of the last step
        self._norm_hidden = zero_stage == 0 and not bf16  # DeepSpeed clips there without reporting the norm

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
        """Call after each backward; the optimizer steps when the accumulation is complete."""
        self.lr = float(self._engine.get_lr()[0])
        if self._norm_hidden and self._engine.is_gradient_accumulation_boundary():
            grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self.grad_norm = float(nn.utils.get_total_norm(grads))
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if norm is not None:
            self.grad_norm = float(norm)

    @property
    def skipped(self) -> int:
        """Steps that DeepSpeed skipped because a gradient was not finite."""
        return int(self._engine.skipped_steps)

    def master_weights(self) -> dict[str, Tensor]:
        """float32 masters of every parameter, averaged where an average is kept, and the buffers, on the CPU.

        Collective: every rank must call it.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        state = {name: buffer.cpu() for name, buffer in self.module.named_buffers()}
        stage_0 = self._stage_0_masters()
        with averages(self._masters):
            for name, parameter in self.module.named_parameters():
                master = stage_0.get(id(parameter))
                master = safe_get_full_fp32_param(parameter) if master is None else master
                state[name] = (parameter if master is None else master).detach().float().cpu().clone()
        return state

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the context the module computes with the averaged weights, where an average is kept. Collective."""
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
        """The masters of bf16 without ZeRO by id of the parameter: DeepSpeed's accessor does not find them there."""
        optimizer = self._engine.optimizer
        low, full = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
        pairs = [pair for group in zip(low, full, strict=True) for pair in zip(*group, strict=True)]
        return {id(parameter): master for parameter, master in pairs}

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Write weights, optimizer, schedule, random state and `state` into the folder `path`. Collective.

        Raises OSError, or RuntimeError where torch reports it so.
        """
        self._engine.save_checkpoint(
            str(path.parent),
            tag=path.name,
            client_state=state | {"rng": torch.get_rng_state(), "python_rng": random.getstate()},
            save_latest=False,
            exclude_frozen_parameters=True,
        )
        flush(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Restore what `save` wrote; returns its `state`. Collective."""
        try:
            _, client = self._engine.load_checkpoint(str(path.parent), tag=path.name)
        except (OSError, RuntimeError, EOFError, UnpicklingError, AssertionError, KeyError) as error:
            raise UserError(
                f"cannot read the checkpoint {path}: it is damaged, or of another version; remove it, and the run "
                "resumes from the one before"
            ) from error
        torch.set_rng_state(client["rng"])
        random.setstate(client["python_rng"])
        return client


def _not_begun(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Reset the step count of groups at a rate of 0, so that Adam's bias correction starts with their first step."""
    for group in optimizer.param_groups:
        for master in group["params"] if not group["lr"] else ():
            if "step" in optimizer.state[master]:
                optimizer.state[master]["step"].zero_()
