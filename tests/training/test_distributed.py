"""The process group of a single process; two processes are in test_train.py."""

from __future__ import annotations

import socket

import torch

from spechead.training.distributed import free_port, start


def test_a_single_process_is_the_first_of_one() -> None:
    ranks = start(torch.device("cpu"))
    assert (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
    assert start(torch.device("cpu")) == ranks, "a second run joins the same group"
    ranks.barrier()
    assert ranks.sum(torch.tensor([1.5, 2.0])).tolist() == [1.5, 2.0]


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
