"""A worker of `train_step.py`: trains the same models with torch, DistributedDataParallel over gloo.

usage: training_torch.py SOCKET MODEL BATCH_SIZE RANK RANKS RENDEZVOUS
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import control
import numpy as np
import torch
import torch.distributed
import training_task
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    path, model, batch_size, rank, ranks, rendezvous = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(ranks)
    )
    peer = Peer(model, int(batch_size), int(rank), int(ranks))
    control.serve(path, "ddp", int(rank), {"ddp": peer.run})
    torch.distributed.destroy_process_group()


class Peer:
    """One replica per process; batches are tensors already."""

    def __init__(self, model: str, batch_size: int, rank: int, ranks: int) -> None:
        # Channels last, the layout that torch's own convolutions prefer here, and in which JAX has the images.
        module = MAKERS[model](training_task.first_variables(model)).to(memory_format=torch.channels_last)
        self._model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        # Measured: one fused kernel per variable takes a quarter off the step of the MLP against torch's default.
        self._optimizer = torch.optim.Adam(self._model.parameters(), training_task.LEARNING_RATE, fused=True)
        batches = training_task.batches_of(rank, batch_size, ranks)
        self._batches = itertools.cycle([_tensors(batch) for batch in batches])

    def run(self, steps: int) -> dict[str, Any]:
        """Steps on batches that are tensors already."""
        losses = []
        torch.distributed.barrier()
        began = time.perf_counter()
        for images, labels in itertools.islice(self._batches, steps):
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(images), labels)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        loss.item()
        return {"seconds": time.perf_counter() - began, "losses": [loss.item() for loss in losses]}


def _tensors(batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, channels last in memory but not in the shape, and labels."""
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


if __name__ == "__main__":
    main()
