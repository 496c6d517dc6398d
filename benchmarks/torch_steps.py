"""Steps of modules of PyTorch: alone, with DDP over gloo, and with `strategies.torch`, in turns in the same processes.

All of them have what makes torch fastest here: Adam with one fused kernel per parameter, convolutions with the channels
last; `--default-adam` is torch's default, several kernels per parameter.

    poprun --num-instances 2 --num-replicas 2 python benchmarks/torch_steps.py
    python benchmarks/torch_steps.py --local-replicas 4    4 replicas in this process, against one after another
    python benchmarks/torch_steps.py --pipeline            what waiting for turns costs for each block and micro-batch

Every process needs a core of its own; only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import popdist
import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch

BATCH = 64
WORDS, LENGTH = 1031, 16
ROUNDS, STEPS = 7, 10


class Block(nn.Module):
    """Attention to what came before, and a wide hidden layer, each behind a normalisation and with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.GELU("tanh"), nn.Linear(3 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, length, width], the same."""
        query, key, value = self.qkv(self.norm(x)).unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.wide(x))


class Transformer(nn.Module):
    """That of `tests/zoo`: two blocks of width 64, and one table for words and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(WORDS, 64), nn.Parameter(torch.randn(LENGTH, 64))
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4), nn.RMSNorm(64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Of words [rows, length] the logits of those that follow, [rows, WORDS, length]."""
        hidden = self.blocks(self.words(words) + self.position)
        return (hidden @ self.words.weight.T).transpose(1, 2)


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1352, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 10)).to(memory_format=torch.channels_last)


def mlp() -> nn.Module:
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


MODELS = {"cnn": cnn, "mlp": mlp, "transformer": Transformer}


def batch_of(name: str, rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and their labels; of the transformer words, and those that follow."""
    if name == "transformer":
        words = torch.randint(0, WORDS, (rows, LENGTH + 1))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()
    images = torch.randn(rows, 1, 28, 28).to(memory_format=torch.channels_last)
    return images, torch.randint(0, 10, (rows,))


class WithLoss(nn.Module):
    """As PopTorch wants it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits and the loss."""
        output = self.module(x)
        return output, F.cross_entropy(output, y)


def in_a_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, fused: bool) -> Callable[[], object]:
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def in_lockstep(strategy: strategies.Strategy, step: Callable[[], object]) -> Callable[[], object]:
    """The step, and a meeting of all instances: what a synchronous step takes where nothing is exchanged."""

    def step_and_meet() -> None:
        step()
        strategy.communicator.barrier(name="step")

    return step_and_meet


def by_trainer(strategy: strategies.Strategy, module: nn.Module, x: torch.Tensor, y: torch.Tensor, fused: bool):
    optimizer = torch.optim.Adam(module.parameters(), fused=fused)
    trainer = strategies.torch.Trainer(
        strategy, module, lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]), optimizer
    )
    return lambda: trainer.step((x, y))


def by_poptorch(strategy: strategies.Strategy, module: nn.Module, x: torch.Tensor, y: torch.Tensor, fused: bool):
    options = poptorch.Options()
    options._strategy = strategy
    wrapped = WithLoss(module)
    training = poptorch.trainingModel(wrapped, options, torch.optim.Adam(wrapped.parameters(), fused=fused))
    return lambda: training(x, y)


def connect_gloo(strategy: strategies.Strategy) -> None:
    """All instances, as ranks of torch.distributed."""
    port = np.zeros(1, np.int64)
    if strategy.instance_index == 0:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port[0] = found.getsockname()[1]
    strategy.communicator.broadcast(port, 0, name="port")
    rank, size = str(strategy.instance_index), str(strategy.num_instances)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), "RANK": rank, "WORLD_SIZE": size}
    torch.distributed.init_process_group("gloo")


def medians_ms(steps: dict[str, Callable[[], object]], meet: Callable[[], object], rounds: int) -> dict[str, float]:
    """Of each kind of step the median over rounds of the mean of some steps; the kinds take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            meet()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            if number:  # the first round is to get warm
                found[name].append((time.perf_counter() - began) / STEPS * 1e3)
    return {name: median(each) for name, each in found.items()}


def compare(names: list[str], rounds: int, fused: bool) -> dict[str, dict[str, float]]:
    """All kinds of steps, for some models."""
    popdist.init()
    strategy = strategies.PopDistStrategy()
    torch.set_num_threads(1)
    if strategy.num_instances > 1:
        connect_gloo(strategy)
    found = {}
    for name in names:
        torch.manual_seed(0)
        module, (x, y) = MODELS[name](), batch_of(name)
        steps = {"torch alone": in_a_loop(copy.deepcopy(module), x, y, fused)}
        if strategy.num_instances > 1:
            steps["in lockstep"] = in_lockstep(strategy, in_a_loop(copy.deepcopy(module), x, y, fused))
            ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=True)
            steps["DDP"] = in_a_loop(ddp, x, y, fused)
        steps["DistributedModel"] = in_a_loop(
            strategies.torch.DistributedModel(copy.deepcopy(module), strategy), x, y, fused
        )
        steps["Trainer"] = by_trainer(strategy, copy.deepcopy(module), x, y, fused)
        steps["trainingModel"] = by_poptorch(strategy, copy.deepcopy(module), x, y, fused)
        found[name] = medians_ms(steps, lambda: strategy.communicator.barrier(name="round"), rounds)
    return found if strategy.instance_index == 0 else {}


def compare_local(names: list[str], replicas: int, rounds: int, fused: bool) -> dict[str, dict[str, float]]:
    """Replicas of one process at once, against as many steps of plain PyTorch one after another."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        torch.manual_seed(0)
        module, (x, y) = MODELS[name](), batch_of(name, replicas * BATCH)
        alone = in_a_loop(copy.deepcopy(module), x[:BATCH], y[:BATCH], fused)
        steps = {
            "one after another": lambda alone=alone: [alone() for _ in range(replicas)],
            "at once": by_trainer(strategies.IPUStrategy(replicas), copy.deepcopy(module), x, y, fused),
        }
        found[name] = medians_ms(steps, lambda: None, rounds)
    return found


class Blocks(nn.Module):
    """Four blocks with little to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number."""
        for number, layer in enumerate(self.layers):
            with poptorch.Block(f"B{number}"):
                x = torch.tanh(layer(x))
        return x.square().mean()


def compare_pipeline(rounds: int, count: int = 16) -> dict[str, dict[str, float]]:
    """A step with and without waiting for turns: all stages on one device do not wait."""
    found = {}
    steps = {}
    for name, devices in (("one device", [0] * 4), ("four devices", [0, 1, 2, 3])):
        options = poptorch.Options()
        options.Training.gradientAccumulation(count)
        stages = [poptorch.Stage(f"B{number}").ipu(device) for number, device in enumerate(devices)]
        options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
        training = poptorch.trainingModel(Blocks(), options)
        steps[name] = lambda training=training: training(torch.ones(count, 8))
    found["four blocks"] = medians_ms(steps, lambda: None, rounds)
    row = found["four blocks"]
    row["per block and micro-batch"] = (row["four devices"] - row["one device"]) / (4 * count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--local-replicas", type=int)
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--default-adam", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if arguments.pipeline:
        found = compare_pipeline(arguments.rounds)
    elif arguments.local_replicas:
        found = compare_local(arguments.models, arguments.local_replicas, arguments.rounds, not arguments.default_adam)
    else:
        found = compare(arguments.models, arguments.rounds, not arguments.default_adam)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(name, ", ".join(f"{kind} {value:.3f} ms" for kind, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
