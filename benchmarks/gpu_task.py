"""The models that `gpu.py` trains, with sizes and data that are the same for JAX and PyTorch, and their steps."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

JAX, TORCH = FRAMEWORKS = ("jax", "torch")
PLAIN, BY_HAND, DDP, OURS = "plain", "by hand", "ddp", "ours"
GPT, MLP, COPY, BITS = "gpt", "mlp", "copy", "bits"
"""Two models; a model whose step only exchanges gradients; a smaller GPT whose bits are compared."""
BATCHES = 4  # different batches, used in turn
WARM_UP_STEPS = 3
LEARNING_RATE = 1e-4
HEAD = 64  # elements of an attention head

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class GpuCase:
    """A row of the table: a model, and the way to train it.

    Attributes:
        part: Part of the benchmark.
        framework: One of FRAMEWORKS.
        model: GPT, MLP, COPY or BITS.
        way: PLAIN, BY_HAND, DDP or OURS.
        replicas: R.
        instances: n.
        exchange: Value of POPDIST_EXCHANGE.
        is_deterministic: Whether operations have the same bits in each run.
        is_small: Whether the model is small, for a CPU.
    """

    part: str
    framework: str
    model: str
    way: str
    replicas: int = 1
    instances: int = 1
    exchange: str = "auto"
    is_deterministic: bool = True
    is_small: bool = False


@dataclass(frozen=True)
class GptSize:
    """The sizes of a GPT: blocks, width, tokens of a row, vocabulary, and rows of a global batch."""

    layers: int
    width: int
    length: int
    words: int
    rows: int


FULL, MEDIUM, TINY = GptSize(12, 768, 512, 50_257, 8), GptSize(4, 256, 128, 4_099, 8), GptSize(2, 64, 32, 101, 8)


def gpt_size(case: GpuCase) -> GptSize:
    if case.is_small:
        return TINY
    return MEDIUM if case.model == BITS else FULL


def mlp_widths(case: GpuCase) -> tuple[int, ...]:
    return (28, 32, 32, 10) if case.is_small else (784, 1024, 1024, 10)


def rows_of(case: GpuCase) -> int:
    """Return the number of rows of a global batch."""
    return 256 if case.model == MLP else gpt_size(case).rows


def data_of(case: GpuCase) -> Arrays:
    """Return BATCHES global batches in a row: tokens and next tokens, or images and labels."""
    random = np.random.default_rng(1)
    count = BATCHES * rows_of(case)
    if case.model == MLP:
        images = random.standard_normal((count, mlp_widths(case)[0]), np.float32)
        return {"x": images, "y": random.integers(0, 10, count).astype(np.int32)}
    size = gpt_size(case)
    tokens = random.integers(0, size.words, (count, size.length)).astype(np.int32)
    return {"x": tokens, "y": np.roll(tokens, -1, 1)}


def batches_of(case: GpuCase) -> list[Arrays]:
    """Return the global batches."""
    rows, data = rows_of(case), data_of(case)
    return [{name: array[k * rows : (k + 1) * rows] for name, array in data.items()} for k in range(BATCHES)]


def rank() -> int:
    """Return the rank that mpirun has given to this process, or 0 without mpirun."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class GpuSteps(ABC):
    """Interface of the training steps of a case on a device that queues them.

    `GpuWorker` calls `step` some times, then `wait`; every method may be called again after that.
    """

    @property
    @abstractmethod
    def device(self) -> str:
        """The name of the kind of device."""

    @abstractmethod
    def step(self) -> Any:
        """Queue a step, and return its loss, which converts to a float on demand."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has made all queued steps."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the peak of the framework's device memory in this process, in bytes."""

    def meet(self) -> None:  # noqa: B027 - a single process has no others to wait for
        """Wait for the other instances."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the variables, or "" if no other case should have the same."""
        return ""
