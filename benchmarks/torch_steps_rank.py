"""A worker of torch_steps.py: one instance of a job that makes steps in one or two ways.

usage: torch_steps_rank.py WAY SOCKET [--default-adam]
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import control
import numpy as np
import timing  # noqa: F401 - timing makes the project importable
import torch
from torch import nn
from torch_models import MODELS, Step, WithLoss, batch_of, by_trainer, in_a_loop

import popdist
import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch

Tensors = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[strategies.Strategy, nn.Module, Tensors, bool], Step]


class Worker:
    """A worker that makes steps of all modules, in all ways of this job.

    Args:
        ways: Functions that make a step, by name.
        fused: Whether Adam has one kernel for each parameter.
    """

    def __init__(self, ways: dict[str, Make], fused: bool) -> None:
        popdist.init()
        torch.set_num_threads(1)
        self.strategy = strategies.PopDistStrategy()
        if "DDP" in ways:
            connect_gloo(self.strategy)
        self._ways, self._fused = ways, fused
        self._steps: dict[tuple[str, str], Step] = {}

    def steps(self, way: str, model: str, count: int) -> float:
        """Return the seconds of `count` steps, which all instances begin together."""
        step = self._steps.get((way, model)) or self._new_step(way, model)
        self.strategy.communicator.barrier(name="turn")
        began = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - began

    def _new_step(self, way: str, model: str) -> Step:
        torch.manual_seed(0)
        module, batch = MODELS[model](), batch_of(model)
        step = self._steps[way, model] = self._ways[way](self.strategy, module, batch, self._fused)
        return step


def alone(strategy: strategies.Strategy, module: nn.Module, batch: Tensors, fused: bool) -> Step:
    """Return a step without communication."""
    return in_a_loop(module, *batch, fused)


def in_lockstep(strategy: strategies.Strategy, module: nn.Module, batch: Tensors, fused: bool) -> Step:
    """Return a step without communication but with a barrier after it: the limit of a synchronous step."""
    step = in_a_loop(module, *batch, fused)

    def step_and_meet() -> None:
        step()
        strategy.communicator.barrier(name="step")

    return step_and_meet


def ddp(strategy: strategies.Strategy, module: nn.Module, batch: Tensors, fused: bool) -> Step:
    """Return a step of DistributedDataParallel, with the fastest options of its documentation."""
    return in_a_loop(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True), *batch, fused)


def distributed_model(strategy: strategies.Strategy, module: nn.Module, batch: Tensors, fused: bool) -> Step:
    """Return a step of ours in the style of DDP."""
    return in_a_loop(strategies.torch.DistributedModel(module, strategy), *batch, fused)


def trainer(strategy: strategies.Strategy, module: nn.Module, batch: Tensors, fused: bool) -> Step:
    """Return a step of ours with a loss function."""
    return by_trainer(strategy, module, *batch, fused)


def training_model(strategy: strategies.Strategy, module: nn.Module, batch: Tensors, fused: bool) -> Step:
    """Return a step of ours with PopTorch's interface."""
    options = poptorch.Options()
    options._strategy = strategy
    wrapped = WithLoss(module)
    training = poptorch.trainingModel(wrapped, options, torch.optim.Adam(wrapped.parameters(), fused=fused))
    return lambda: training(*batch)


JOBS: dict[str, dict[str, Make]] = {
    "alone": {"torch alone": alone, "in lockstep": in_lockstep},
    "ddp": {"DDP": ddp},
    "model": {"DistributedModel": distributed_model},
    "trainer": {"Trainer": trainer},
    "poptorch": {"trainingModel": training_model},
}
"""The ways of each job; each way has its own job, so that its changes to the process affect no other way."""


def connect_gloo(strategy: strategies.Strategy) -> None:
    """Connect all instances as ranks of torch.distributed, over gloo."""
    port = np.zeros(1, np.int64)
    if strategy.instance_index == 0:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port[0] = found.getsockname()[1]
    strategy.communicator.broadcast(port, 0, name="port")
    rank, size = str(strategy.instance_index), str(strategy.num_instances)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), "RANK": rank, "WORLD_SIZE": size}
    torch.distributed.init_process_group("gloo")


def main() -> None:
    job, path, *options = sys.argv[1:]
    worker = Worker(JOBS[job], fused="--default-adam" not in options)
    handlers: dict[str, Callable[..., Any]] = {"steps": worker.steps}
    control.serve(path, job, worker.strategy.instance_index, handlers)


if __name__ == "__main__":
    main()
