"""Train a small PyTorch module under any strategy, and print the results of each instance.

usage: train_module.py popdist|loop|pipeline|workers|horovod STEPS
"""

from __future__ import annotations

import itertools
import json
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F

import popdist
import strategies
import strategies.torch

BATCH_SIZE = 2
ROWS = 64


def new_strategy(name: str) -> strategies.Strategy:
    if name in ("popdist", "loop", "pipeline"):
        popdist.init()
        return strategies.PopDistStrategy()
    if name == "workers":
        return strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(), num_local_replicas=2)
    return strategies.IPUHorovodStrategy()


def new_module() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 40),
        torch.nn.BatchNorm1d(40),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(40, 4),
    )


def loss_fn(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


class Rows:
    """Rows with random access; guilty ones are shifted by a number of an unseeded generator."""

    def __init__(self, is_guilty: bool) -> None:
        rng = np.random.default_rng(0)
        self._x = rng.standard_normal((ROWS, 16)).astype(np.float32)
        self._y = rng.integers(0, 4, ROWS)
        self._shift = np.float32(random.random() if is_guilty else 0.0)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"x": self._x[number] + self._shift, "y": self._y[number]}


def train(strategy: strategies.Strategy, steps: int, is_guilty: bool = False) -> tuple[str, str]:
    """Return fingerprints of the parameters and of the buffers."""
    module = new_module()
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer)
    dataset = strategies.torch.distribute_dataset(strategy, Rows(is_guilty), batch_size=BATCH_SIZE)
    epoch = 0
    while trainer.steps_made < steps:
        for batch in dataset.epoch(epoch):
            trainer.step(batch)
            if trainer.steps_made == steps:
                break
        epoch += 1
    state = trainer.state
    trainer.close()
    return strategies.fingerprint(state.variables), strategies.fingerprint(state.model_state)


def loop(strategy: strategies.Strategy, steps: int) -> tuple[str, str]:
    """Return the same fingerprints, of a loop of the program."""
    module = new_module()
    model = strategies.torch.DistributedModel(module, strategy)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    dataset = strategies.torch.distribute_dataset(strategy, Rows(False), batch_size=BATCH_SIZE)
    for batch in itertools.islice(dataset.epoch(0), steps):
        optimizer.zero_grad()
        model.backward(lambda rows: loss_fn(model, rows), batch)
        optimizer.step()
    parameters = {name: one.detach().numpy() for name, one in module.named_parameters()}
    return strategies.fingerprint(parameters), strategies.fingerprint({n: b.numpy() for n, b in module.named_buffers()})


def train_in_stages(strategy: strategies.Strategy, steps: int) -> tuple[str, str]:
    """Return the fingerprints of a training in a pipeline of two devices for each replica."""
    import strategies.torch.poptorch as poptorch

    def loss_in_stages(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with poptorch.Block("B1"):
            hidden = module[:3](batch["x"])
        with poptorch.Block("B2"):
            return F.cross_entropy(module[3:](hidden), batch["y"])

    execution = poptorch.PipelinedExecution(poptorch.Stage("B1").ipu(0), poptorch.Stage("B2").ipu(1))
    options = {"gradient_accumulation_count": 2, "pipeline": execution.pipeline}
    module = new_module()
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    trainer = strategies.torch.Trainer(strategy, module, loss_in_stages, optimizer, **options)
    dataset = strategies.torch.distribute_dataset(
        strategy, Rows(False), batch_size=BATCH_SIZE, gradient_accumulation_count=2
    )
    for batch in itertools.islice(dataset.epoch(0), steps):
        trainer.step(batch)
    state = trainer.state
    trainer.close()
    return strategies.fingerprint(state.variables), strategies.fingerprint(state.model_state)


WAYS = {"loop": loop, "pipeline": train_in_stages}


if __name__ == "__main__":
    strategy = new_strategy(sys.argv[1])
    found = WAYS.get(sys.argv[1], train)(strategy, int(sys.argv[2]))
    print(json.dumps([strategy.instance_index, len(strategy.local_replicas), *found]), flush=True)
