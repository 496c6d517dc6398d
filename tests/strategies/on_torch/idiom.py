"""An idiom of PyTorch: one way to write a module, a loss or a loop, and three ways to train it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import strategies
import strategies.torch
from strategies.data.randomness import drawing

STEPS, ROWS = 3, 2  # per replica
CLASSES, FEATURES, WORDS, LENGTH = 3, 8, 10, 4

Program = Callable[[nn.Module, torch.optim.Optimizer], Generator[None, float, None]]
"""Code of a program around its steps: the part before the first `yield` runs before the first step, each `yield`
returns the loss of a step, and the part after the last `yield` runs after that step."""

_building = drawing  # instances are threads, and programs draw from the generator of the process, as replicas do


class Apply(nn.Module):
    """A module whose forward pass is one function: `Apply(lambda self, x: self.last(x), last=nn.Linear(8, 3))`."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *arguments: Any) -> Any:
        """Return the result of `function`."""
        return self.function(self, *arguments)


def mlp() -> nn.Module:
    """Make two layers with dropout between them."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, CLASSES))


def classify(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of the module's output for "x"."""
    return F.cross_entropy(module(batch["x"]), batch["y"])


def read(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of the module's output for "words"."""
    return F.cross_entropy(module(batch["words"]), batch["y"])


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return the default optimizer of idioms."""
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def uneventful(module: nn.Module, optimizer: torch.optim.Optimizer) -> Generator[None, float, None]:
    """Run the steps and change nothing."""
    for _ in range(STEPS):
        yield


@dataclass(frozen=True)
class Idiom:
    """A row of the tables; a new row needs a name and the part that it tests.

    Attributes:
        name: Name of the row.
        module: Makes the module; its parameters come from the generator of the process.
        loss: The loss function, as for `strategies.torch.Trainer`.
        optimizer: Makes the optimizer.
        program: The code around the steps, a `Program`.
        options: Options of `Trainer`; plain PyTorch and loops support only `before_update` and `plain`.
        refused: A pattern in the message of the error that `Trainer` raises; empty if the idiom trains.
        refused_from: The smallest number of replicas at which the idiom is refused.
        loops: Whether a loop with a `DistributedModel` has the bits of a `Trainer`.
        is_plain: Whether one replica has the bits of plain PyTorch.
        tolerance: Relative tolerance of one replica against plain PyTorch; 0 for the same bits.
        waiting: The reason why the row is left out for now.
    """

    name: str
    module: Callable[[], nn.Module] = mlp
    loss: Callable[[nn.Module, Any], Any] = classify
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    program: Program = uneventful
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    refused_from: int = 1
    loops: bool = True
    is_plain: bool = True
    tolerance: float = 0.0
    waiting: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def has_loop(self) -> bool:
        """Whether the idiom is also tried as a loop."""
        return self.loops and not self.refused and self.options.keys() <= {"before_update"}


def drawn(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, called with the same random numbers each time."""
    with _building, torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return make()


def rows_of(step: int, replicas: range) -> dict[str, Any]:
    """Return the batch of the given replicas."""
    generator = torch.Generator().manual_seed(step)
    rows = slice(ROWS * replicas.start, ROWS * replicas.stop)
    return {
        "x": torch.randn(16, FEATURES, generator=generator)[rows],
        "y": torch.randint(0, CLASSES, (16,), generator=generator)[rows],
        "words": torch.randint(0, WORDS, (16, LENGTH), generator=generator)[rows],
    }


Found = tuple[list[torch.Tensor], list[float]]
"""The tensors of a module, and the losses of all steps."""


def trained_by(idiom: Idiom, module: nn.Module, optimizer: Any, step: Callable[[int], float]) -> Found:
    """Run the program of an idiom, with a function that makes a step and returns its loss."""
    program, losses = idiom.program(module, optimizer), []
    next(program)
    while True:
        losses.append(step(len(losses)))
        try:
            program.send(losses[-1])
        except StopIteration:
            break
    program.close()
    return [one.detach().clone() for one in module.state_dict().values() if isinstance(one, torch.Tensor)], losses


def _loss(returned: Any) -> torch.Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def by_plain_pytorch(idiom: Idiom) -> Found:
    """Train in one process with one replica and no strategy."""
    module = drawn(idiom.module)
    optimizer = idiom.optimizer(module)

    def step(number: int) -> float:
        optimizer.zero_grad()
        torch.manual_seed(strategies.torch.seed_of(0, 0, number))
        loss = _loss(idiom.loss(module, rows_of(number, range(1))))
        loss.backward()
        idiom.options.get("before_update", lambda _: None)(module)
        optimizer.step()
        return float(loss.detach())

    return trained_by(idiom, module, optimizer, step)


def by_trainer(idiom: Idiom, strategy: strategies.strategy.Strategy) -> Found:
    """Train the local replicas of an instance with a `Trainer`."""
    module = drawn(idiom.module)
    optimizer = idiom.optimizer(module)
    trainer = strategies.torch.Trainer(strategy, module, idiom.loss, optimizer, **idiom.options)
    try:
        return trained_by(
            idiom, module, optimizer, lambda number: trainer.step(rows_of(number, strategy.local_replicas))["loss"]
        )
    finally:
        trainer.close()


def by_loop(idiom: Idiom, strategy: strategies.strategy.Strategy) -> Found:
    """Train by a loop of the program's own; the losses are those of this replica."""
    module = drawn(idiom.module)
    optimizer = idiom.optimizer(module)
    model = strategies.torch.DistributedModel(module, strategy)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = _loss(idiom.loss(model, rows_of(number, strategy.local_replicas)))
        loss.backward()
        idiom.options.get("before_update", lambda _: None)(module)
        optimizer.step()
        return float(loss.detach())

    return trained_by(idiom, module, optimizer, step)


def bits_of(found: Found) -> tuple[list[bytes], list[float]]:
    """Return the bits that must be equal."""
    tensors, losses = found
    return [strategies.fingerprint([one.contiguous().numpy()]) for one in map(_readable, tensors)], losses


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@contextmanager
def hooked(handle: Any) -> Generator[None, None, None]:
    """Remove a hook at the end."""
    try:
        yield
    finally:
        handle.remove()


def named(rows: Sequence[Idiom]) -> dict[str, Idiom]:
    """Return the rows by name."""
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "two idioms have one name"
    return found
