"""Random numbers of PyTorch, NumPy and Python that depend on a seed alone, for code of one replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from strategies.data.randomness import seed_python_and_numpy
from strategies.torch.replicas.generators import Baton, kept_generators, seed_generators


def seed_all(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python of a process that draws for one replica only."""
    torch.manual_seed(seed)
    seed_python_and_numpy(seed)


@contextmanager
def drawing_all_from(seed: int, device: torch.device) -> Iterator[None]:
    """Let the code inside draw from generators with this seed, on the CPU and on the device."""
    with kept_generators(device), Baton(device):
        seed_generators(seed, device)
        yield
