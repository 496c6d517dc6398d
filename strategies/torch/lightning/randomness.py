"""Random numbers of PyTorch, NumPy and Python that depend on a seed alone, for code of one replica."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from strategies.torch.randomness import drawing_from

_WORD = 2**32  # NumPy's global generator takes seeds of 32 bits


def seed_all(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python of a process that draws for one replica only."""
    torch.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % _WORD)  # noqa: NPY002 - programs draw from it


@contextmanager
def drawing_alike(seed: int) -> Iterator[None]:
    """Seed the global generators of NumPy and Python for the code inside, and restore their states afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    _seed_others(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def drawing_all_from(seed: int, device: torch.device, replica: int | None = None) -> Iterator[None]:
    """Let the code inside draw from generators with this seed, on the CPU and on the device; see `drawing_from`."""
    with drawing_alike(seed), drawing_from(seed, device, replica):
        yield
