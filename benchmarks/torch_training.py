"""What the peers in torch share: the models, the optimizer, the batches and the loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import training_task
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(name: str) -> nn.Module:
    """Channels last: the layout that torch's own convolutions prefer here, and in which JAX has the images."""
    return MAKERS[name](training_task.first_variables(name)).to(memory_format=torch.channels_last)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam; measured: one fused kernel per variable takes a quarter off the step of the MLP against torch's default."""
    return torch.optim.Adam(model.parameters(), training_task.LEARNING_RATE, fused=True)


def make_batches(rank: int, batch_size: int, ranks: int) -> list[Batch]:
    """Those of one rank: images, channels last in memory but not in the shape, and labels."""
    return [_tensors(batch) for batch in training_task.batches_of(rank, batch_size, ranks)]


class Training:
    """One replica per process; batches are tensors already.

    Args:
        model: its gradients are exchanged by itself or by the optimizer.
        optimizer: of its parameters.
        batches: used in turn.
        barrier: returns when all ranks have called it.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], barrier: Callable[[], Any]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._batches = itertools.cycle(batches)
        self._barrier = barrier

    def run(self, steps: int) -> dict[str, Any]:
        """Seconds, and the loss of each step."""
        losses = []
        self._barrier()
        began = time.perf_counter()
        for images, labels in itertools.islice(self._batches, steps):
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(images), labels)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        loss.item()
        return {"seconds": time.perf_counter() - began, "losses": [loss.item() for loss in losses]}


def _tensors(batch: dict[str, np.ndarray]) -> Batch:
    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last), torch.from_numpy(batch["label"].astype(np.int64))


def make_cnn(variables: training_task.Arrays) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(13 * 13 * 8, 8),
        nn.ReLU(),
        nn.Linear(8, 10),
    )
    _set(model[0], variables["conv"]["kernel"].transpose(3, 2, 0, 1), variables["conv"]["bias"])
    kernel = variables["hidden"]["kernel"].reshape(13, 13, 8, 8).transpose(3, 2, 0, 1)  # here channels come first
    _set(model[4], kernel.reshape(8, -1), variables["hidden"]["bias"])
    _set(model[6], variables["logits"]["kernel"].T, variables["logits"]["bias"])
    return model


def make_mlp(variables: training_task.Arrays) -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    for place, layer in zip((1, 3, 5), variables.values(), strict=True):
        _set(model[place], layer["kernel"].T, layer["bias"])
    return model


def _set(layer: Any, kernel: np.ndarray, bias: np.ndarray) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(kernel)))
        layer.bias.copy_(torch.from_numpy(bias))


MAKERS = {"cnn": make_cnn, "mlp": make_mlp}
