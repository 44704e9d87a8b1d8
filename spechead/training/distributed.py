"""The processes of a run: which of them this one is, and how it joins the others (gloo on CPUs, nccl on GPUs)."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
        """The sum of `values` (on the CPU) over all ranks, computed on the device, the only one nccl supports."""
        if self.world == 1:
            return values
        on_device = values.to(self.device)
        dist.all_reduce(on_device)
        return on_device.cpu()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def start(device: torch.device) -> Ranks:
    """Join the processes that torchrun started; for a single process, set the variables that torchrun would have set.

    A second run in the same process joins the same group.
    """
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), device)
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    _import_deepspeed(device)
    import deepspeed

    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )
    atexit.register(dist.destroy_process_group)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _import_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for the device, and let it log errors only."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "ERROR")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # On a CPU DeepSpeed would compile a shared-memory transport with g++; gloo does the same work without a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
