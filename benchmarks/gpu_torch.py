"""The models of `gpu.py` in PyTorch, and the ways to train them: plain, DDP, and with this project."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

import torch
import torch.nn.functional as F
from gpu_task import (
    COPY,
    DDP,
    HEAD,
    LEARNING_RATE,
    MLP,
    PLAIN,
    GptSize,
    GpuCase,
    GpuSteps,
    batches_of,
    data_of,
    gpt_size,
    mlp_widths,
    rank,
    rows_of,
)
from resident_memory import peak_bytes
from torch import nn

ON_GPU = torch.cuda.is_available()


def steps_of(case: GpuCase) -> GpuSteps:
    if not ON_GPU:
        torch.set_num_threads(1)  # our replicas have one thread each
    if case.is_deterministic:  # the project's own settings, for all ways
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
    return {PLAIN: PlainTorch, DDP: DdpTorch}.get(case.way, OursTorch)(case)


# ---- models


class GptBlock(nn.Module):
    """A block of causal attention and a wide hidden layer, each after a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, with the shape of its input, [rows, length, width]."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GptModule(nn.Module):
    """A decoder that has one table for tokens and logits."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(size.words, size.width),
            nn.Parameter(torch.zeros(size.length, size.width)),
        )
        self.blocks = nn.Sequential(*(GptBlock(size.width) for _ in range(size.layers)), nn.LayerNorm(size.width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens, [rows, length, words], for tokens [rows, length]."""
        return self.blocks(self.words(tokens) + self.places) @ self.words.weight.T


def module_of(case: GpuCase) -> nn.Module:
    torch.manual_seed(0)
    if case.model != MLP:
        return GptModule(gpt_size(case))
    layers = [layer for a, b in itertools.pairwise(mlp_widths(case)) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def loss_of(case: GpuCase) -> Any:
    return {MLP: mlp_loss, COPY: copy_loss}.get(case.model, gpt_loss)


def gpt_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens, computed in bfloat16."""
    with torch.autocast("cuda" if ON_GPU else "cpu", dtype=torch.bfloat16):
        logits = module(batch["x"])
    return F.cross_entropy(logits.float().flatten(0, 1), batch["y"].flatten().long())


def mlp_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"].long())


def copy_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss whose gradients cost only their memory."""
    total = torch.stack([parameter.sum() for parameter in module.parameters()]).sum()
    return total * batch["x"].float().mean() * 1e-6


def optimizer_of(case: GpuCase, module: nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.SGD if case.model == COPY else torch.optim.AdamW
    return kind(module.parameters(), LEARNING_RATE)


# ---- ways


class PlainTorch(GpuSteps):
    """Training steps as in PyTorch's documentation; batches come from the host."""

    def __init__(self, case: GpuCase) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
        self._module = module_of(case).to(self._device)
        self._optimizer = optimizer_of(case, self._module)
        self._loss = loss_of(case)
        self._batches = itertools.cycle(
            [{name: torch.from_numpy(array.copy()) for name, array in batch.items()} for batch in batches_of(case)]
        )

    @property
    def device(self) -> str:
        """The kind of the device."""
        return device_kind()

    def step(self) -> Any:
        """Queue a forward and a backward pass, and the update."""
        batch = {name: tensor.to(self._device) for name, tensor in next(self._batches).items()}
        self._optimizer.zero_grad()
        loss = self._loss(self._module, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Wait for all streams."""
        synchronize()

    def peak_bytes(self) -> int:
        """Return the peak of PyTorch's allocator."""
        return peak_of_torch()


class DdpTorch(PlainTorch):
    """DistributedDataParallel over NCCL, or over gloo on CPUs; each instance has its part of the global batch."""

    def __init__(self, case: GpuCase) -> None:
        if ON_GPU:
            torch.cuda.set_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if ON_GPU else "gloo")
        super().__init__(case)
        self._module = nn.parallel.DistributedDataParallel(self._module, gradient_as_bucket_view=True)
        self._optimizer = optimizer_of(case, self._module)
        rows, first = rows_of(case) // case.instances, rank() * rows_of(case) // case.instances
        whole = [next(self._batches) for _ in range(4)]
        own = [{name: tensor[first : first + rows] for name, tensor in batch.items()} for batch in whole]
        self._batches = itertools.cycle(own)

    def meet(self) -> None:
        """Wait for the other instances."""
        torch.distributed.barrier()


class OursTorch(GpuSteps):
    """Steps of our Trainer on the replicas of this instance."""

    def __init__(self, case: GpuCase) -> None:
        import popdist
        import strategies
        import strategies.torch

        popdist.init(case.replicas)
        self._strategy = strategies.PopDistStrategy()
        self._module = module_of(case)
        options: dict[str, Any] = {"replica_device": "cuda"} if ON_GPU else {}
        optimizer = optimizer_of(case, self._module)
        self._trainer = strategies.torch.Trainer(self._strategy, self._module, loss_of(case), optimizer, **options)
        rows = rows_of(case) // case.replicas
        dataset = strategies.torch.distribute_dataset(self._strategy, data_of(case), batch_size=rows, shuffle=False)
        self._batches = itertools.cycle(list(dataset.epoch(0)))

    @property
    def device(self) -> str:
        """The kind of the device."""
        return device_kind()

    def step(self) -> Any:
        """Make a step, and return its metrics unread."""
        self._metrics = self._trainer.step(next(self._batches))
        return self

    def __float__(self) -> float:
        return float(self._metrics["loss"])

    def wait(self) -> None:
        """Wait for all streams."""
        synchronize()

    def peak_bytes(self) -> int:
        """Return the peak of PyTorch's allocator, which does not count the driver's windows."""
        return peak_of_torch()

    def meet(self) -> None:
        """Wait for the other instances."""
        self._strategy.communicator.barrier(name="turn")

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters."""
        digest = hashlib.sha256()
        for parameter in self._module.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        return digest.hexdigest()


def device_kind() -> str:
    return torch.cuda.get_device_name() if ON_GPU else "cpu"


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def peak_of_torch() -> int:
    return torch.cuda.max_memory_allocated() if ON_GPU else peak_bytes()
