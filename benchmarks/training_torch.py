"""A worker of `train_step.py` with torch: DistributedDataParallel over gloo, or Horovod, on the same models.

usage: training_torch.py SOCKET MODEL BATCH_SIZE RANK RANKS RENDEZVOUS     with DistributedDataParallel
       training_torch.py SOCKET MODEL BATCH_SIZE                           with Horovod, under mpirun
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import control
import numpy as np
import torch
import training_task
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    path, model, batch_size, *place = sys.argv[1:]
    torch.set_num_threads(1)
    if place:
        with_ddp(path, model, int(batch_size), int(place[0]), int(place[1]), place[2])
    else:
        with_horovod(path, model, int(batch_size))


def with_ddp(path: str, name: str, batch_size: int, rank: int, ranks: int, rendezvous: str) -> None:
    import torch.distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(make_model(name), gradient_as_bucket_view=True)
    batches = make_batches(rank, batch_size, ranks)
    training = Training(model, make_optimizer(model), batches, torch.distributed.barrier)
    control.serve(path, "ddp", rank, {"ddp": training.run})
    torch.distributed.destroy_process_group()


def with_horovod(path: str, name: str, batch_size: int) -> None:
    """Train as in Horovod's documentation."""
    from horovod import torch as hvd

    hvd.init()
    model = make_model(name)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    # broadcast_optimizer_state is not called: Adam has no state yet, and Horovod would make a step to get one. Then the
    # losses would differ from those of the other ways.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batches = make_batches(hvd.rank(), batch_size, hvd.size())
    training = Training(model, optimizer, batches, hvd.barrier)
    control.serve(path, "hvd", hvd.rank(), {"hvd": training.run})
    hvd.shutdown()


def make_model(name: str) -> nn.Module:
    """Make a module with channels last, the layout that torch's convolutions prefer here and that JAX's images have."""
    return MAKERS[name](training_task.first_variables(name)).to(memory_format=torch.channels_last)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make Adam with one fused kernel per variable; measured: a quarter faster on the MLP's step than the default."""
    return torch.optim.Adam(model.parameters(), training_task.LEARNING_RATE, fused=True)


def make_batches(rank: int, batch_size: int, ranks: int) -> list[Batch]:
    """Return the batches of one rank: images, with channels last in memory but not in the shape, and labels."""
    return [_tensors(batch) for batch in training_task.batches_of(rank, batch_size, ranks)]


class Training:
    """Training steps with one replica per process, on batches that are tensors.

    Args:
        model: Module; it or the optimizer exchanges its gradients.
        optimizer: Optimizer of its parameters.
        batches: Batches, used in turn.
        barrier: Function that returns when all ranks have called it.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], barrier: Callable[[], Any]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._batches = itertools.cycle(batches)
        self._barrier = barrier

    def run(self, steps: int) -> dict[str, Any]:
        """Make steps, and return the seconds and the loss of each step."""
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
    kernel = variables["hidden"]["kernel"].reshape(13, 13, 8, 8).transpose(3, 2, 0, 1)  # torch has channels first
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


if __name__ == "__main__":
    main()
