"""The random numbers of a micro-batch in the program's own training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from strategies.torch.replicas.generators import drawing_by


class _Accelerator(Protocol):
    """A module like `torch.cuda`, with one generator for each device."""

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the device's generator."""

    def set_rng_state(self, new_state: torch.Tensor, device: torch.device) -> None:
        """Set the state of the device's generator."""


class MicroBatchRandomness:
    """The generators of a micro-batch. Its forward passes draw from them, one pass after another.

    An accelerator has one generator per process. A forward pass begins with the state that the pass before has left.
    Afterwards the program's own state is restored.

    Args:
        seed: The seed of the generators.
        device: The device of the module.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._of_host = torch.Generator().manual_seed(seed)
        self._device = None if device.type == "cpu" else device
        self._there = None if self._device is None else torch.Generator(device).manual_seed(seed).get_state()

    def states(self) -> list[torch.Tensor]:
        """Return the states of the generators, in tensors on the host."""
        there = [] if self._there is None else [self._there.clone()]
        return [self._of_host.get_state(), *there]

    def is_at(self, states: list[torch.Tensor]) -> bool:
        """Return whether nothing was drawn since the generators had these states."""
        return all(torch.equal(one, other) for one, other in zip(self.states(), states, strict=True))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let a forward pass draw its random numbers from these generators."""
        with drawing_by(self._of_host), self._drawing_there():
            yield

    @contextmanager
    def _drawing_there(self) -> Iterator[None]:
        if self._device is None or self._there is None:
            yield
            return
        accelerator: _Accelerator = torch.get_device_module(self._device)
        before = accelerator.get_rng_state(self._device)
        accelerator.set_rng_state(self._there, self._device)
        try:
            yield
        finally:
            self._there = accelerator.get_rng_state(self._device)
            accelerator.set_rng_state(before, self._device)
