"""Forks of a process with gRPC workers, as `multiprocessing` makes them to load data."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from grpc_jobs import socket_addresses
from grpc_threads import WorkerThreads

from collectives import Communicator

CHILDREN = 8


def test_a_child_forked_while_workers_communicate_survives() -> None:
    def talk(communicator: Communicator) -> None:
        while not communicator.all_reduce(np.full(1, has_ended[0]), "max")[0]:
            pass
        communicator.close()

    has_ended = [0]
    with socket_addresses(2) as addresses, ThreadPoolExecutor(2) as pool:
        workers = WorkerThreads(addresses)
        ranks = [workers.join(rank) for rank in range(2)]
        talking = [pool.submit(talk, rank.result()) for rank in ranks]
        ends = [end_of_a_child() for _ in range(CHILDREN)]
        has_ended[0] = 1
        for each in talking:
            each.result()
    assert ends == [0] * CHILDREN


def end_of_a_child() -> int:
    """Return the status of a child process that waits for a child of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and JAX say that threads and forks are dangerous together
        child = os.fork()
    if child == 0:
        own = os.fork()
        os._exit(os.waitpid(own, 0)[1] != 0 if own else 0)
    return os.waitpid(child, 0)[1]
