"""Random numbers that a data set draws from the global generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from strategies.typing import Data, Element

_WORD = 2**32  # NumPy's global generator takes seeds of 32 bits


class _State(Protocol):
    def numpy(self) -> np.ndarray: ...


class _Generator(Protocol):
    """PyTorch's generator, which this module does not import."""

    def get_state(self) -> _State: ...

    def set_state(self, state: _State, /) -> object: ...

    def manual_seed(self, seed: int, /) -> object: ...


def seed_python_and_numpy(seed: int) -> None:
    """Seed the global generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % _WORD)  # noqa: NPY002 - programs draw from it


@contextmanager
def _kept_python_and_numpy() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def drawing_alike(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy for the code inside, and restore their states afterwards."""
    with _kept_python_and_numpy():
        seed_python_and_numpy(seed)
        yield


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the global generators afterwards, that of PyTorch on the CPU too."""
    torch = _generator_of_torch()
    before = None if torch is None else torch.get_state()
    with _kept_python_and_numpy():
        try:
            yield
        finally:
            if torch is not None and before is not None:
                torch.set_state(before)


def seed_from(*numbers: int) -> int:
    """Return a seed of 64 bits that depends on all numbers and on their order."""
    words = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def seed_for(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators for one element of a data set in one epoch."""
    word = seed_from(seed, epoch, index)
    seed_python_and_numpy(word)
    torch = _generator_of_torch()
    if torch is not None:
        torch.manual_seed(word)


class SeededElements:
    """A data set whose random numbers depend on the seed, the epoch and the element, and not on what was read before.

    Reading an element seeds the global generators. What follows, such as a `collate_fn`, goes on with the last
    element's numbers. Use it inside of `kept_generators`, while no other thread draws.

    Args:
        source: The data set.
        seed: The seed.
        epoch: The number of the epoch.
    """

    def __init__(self, source: Data, seed: int, epoch: int) -> None:
        self._source, self._seed, self._epoch = source, seed, epoch

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Element:
        seed_for(self._seed, self._epoch, index)
        return self._source[index]


class WatchedElements(SeededElements):
    """The same, which also sees whether random numbers are drawn; comparing states takes 80 us for each element."""

    def __init__(self, source: Data, seed: int, epoch: int) -> None:
        super().__init__(source, seed, epoch)
        self._seeded: object = None  # the states after the last seeding
        self._draws = False

    def __getitem__(self, index: int) -> Element:
        self._look()
        seed_for(self._seed, self._epoch, index)
        self._seeded = None if self._draws else _states()
        return self._source[index]

    @property
    def draws(self) -> bool:
        """Whether random numbers were drawn since the first element was read. Ask before generators are restored."""
        self._look()
        return self._draws

    def _look(self) -> None:
        self._draws = self._draws or (self._seeded is not None and self._seeded != _states())


def _states() -> tuple[object, ...]:
    """Return the states of the global generators, to compare them."""
    _, keys, place, *normal = np.random.get_state()  # noqa: NPY002
    torch = _generator_of_torch()
    of_torch = None if torch is None else torch.get_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), place, *normal, of_torch


def _generator_of_torch() -> _Generator | None:
    """Return PyTorch's generator for the CPU; None if the program has not imported PyTorch."""
    found: _Generator | None = getattr(sys.modules.get("torch"), "default_generator", None)
    return found
