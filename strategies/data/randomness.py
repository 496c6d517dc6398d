"""Random numbers that a data set draws from the global generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from operator import methodcaller
from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import mtrand

import strategies.trees as trees
from strategies.errors import StrategyError
from strategies.typing import Data, Element, Tree

_WORD = 2**32  # NumPy's global generator takes seeds of 32 bits
_IN_BETWEEN = np.random.PCG64(0)
_of_numpy = mtrand._rand
"""NumPy's global generator, from which `np.random.rand` and others draw."""
_unused: list[np.random.MT19937] = []
are_kept: ContextVar[bool] = ContextVar("strategies.data.randomness", default=False)
"""Whether this thread is inside of `kept_generators`."""
drawing = threading.RLock()
"""Held by a thread while it draws from global generators that it has seeded."""
# In a forked child, such as a worker of a loader, no thread of the parent is left to release it.
os.register_at_fork(after_in_child=partial(methodcaller("_at_fork_reinit"), drawing))


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


class GeneratorStates(NamedTuple):
    """The states of the global generators that `lifted` has taken away.

    Attributes:
        of_python: The state of Python's generator.
        of_numpy: NumPy's generator of bits.
        normal: The state of NumPy's other numbers: a normal one that is drawn but not given out yet.
        of_torch: The state of PyTorch's generator for the CPU; None without PyTorch.
    """

    of_python: tuple[object, ...]
    of_numpy: np.random.BitGenerator
    normal: Tree
    of_torch: _State | None


def lifted() -> GeneratorStates:
    """Take the states of the global generators away, and return them. Seed the generators then, and `lay` them back.

    To swap NumPy's generator of bits takes 5 us, and to copy its state twice 160 us.
    """
    torch = _generator_of_torch()
    with drawing:
        of_numpy = mtrand.get_bit_generator()
        _of_numpy._bit_generator = _IN_BETWEEN  # not by set_bit_generator, which drops the normal number
        normal = np.random.get_state(legacy=False)  # noqa: NPY002 - a small state, because the bits are elsewhere
        mtrand.set_bit_generator(_unused.pop() if _unused else np.random.MT19937(0))
    return GeneratorStates(random.getstate(), of_numpy, normal, None if torch is None else torch.get_state())


def lay(states: GeneratorStates) -> None:
    """Give the global generators the states that `lifted` has taken away."""
    random.setstate(states.of_python)
    with drawing:
        if isinstance(now := mtrand.get_bit_generator(), np.random.MT19937):
            _unused.append(now)
        mtrand.set_bit_generator(states.of_numpy)
        _of_numpy._bit_generator = _IN_BETWEEN
        np.random.set_state(states.normal)  # noqa: NPY002
        _of_numpy._bit_generator = states.of_numpy
    if (torch := _generator_of_torch()) is not None and states.of_torch is not None:
        torch.set_state(states.of_torch)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the global generators afterwards, that of PyTorch on the CPU too."""
    with drawing:
        states, token = lifted(), are_kept.set(True)
        try:
            yield
        finally:
            are_kept.reset(token)
            lay(states)


class StatesOfProgram:
    """The states of the program's generators while others draw from the global generators for a whole step.

    Attributes:
        kept: The states; None if the global generators have them.
        has_others: Whether there may be others, because a framework has such steps.
    """

    def __init__(self) -> None:
        self.kept: GeneratorStates | None = None
        self.has_others = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let code of the program draw from its own generators, in a thread beside the one that makes steps."""
        with drawing:
            if self.kept is None:
                yield
                return
            others = lifted()
            lay(self.kept)
            try:
                yield
            finally:
                self.kept = lifted()
                lay(others)


of_program = StatesOfProgram()


def seed_from(*numbers: int) -> int:
    """Return a seed of 64 bits that depends on all numbers and on their order."""
    words = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def seed_for(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators for one element of a data set in one epoch."""
    word = seed_from(seed, epoch, index)
    seed_python_and_numpy(word)
    if (torch := _generator_of_torch()) is not None:
        torch.manual_seed(word)


class DrawWatch:
    """A watch over the global generators that sees draws between two seedings. Comparing states takes some 80 us.

    Attributes:
        has_seen: Whether random numbers were drawn. If they were, nothing is compared any more.
    """

    def __init__(self, has_seen: bool = False) -> None:
        self.has_seen = has_seen
        self._seeded: object = None  # the states after the last seeding

    def begin(self) -> None:
        """Remember the states after a seeding."""
        self._seeded = None if self.has_seen else _states()

    def look(self) -> bool:
        """Return whether random numbers were drawn. Call it before states are seeded anew or restored."""
        self.has_seen = self.has_seen or (self._seeded is not None and self._seeded != _states())
        return self.has_seen


class SeededElements:
    """A data set whose random numbers depend on the seed, the epoch and the element, and not on what was read before.

    Reading an element seeds the global generators. What follows, such as a `collate_fn`, goes on with the last
    element's numbers. Use it inside of `kept_generators`, while no other thread draws.

    Args:
        source: The data set.
        seed: The seed.
        epoch: The number of the epoch.
        watch: The watch that sees whether elements draw.
        reads_twice: Whether to read elements twice, and to refuse those that differ.
    """

    def __init__(self, source: Data, seed: int, epoch: int, watch: DrawWatch, reads_twice: bool) -> None:
        self._source, self._seed, self._epoch, self._watch = source, seed, epoch, watch
        self._reads_twice = reads_twice

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Element:
        element = self._read(index)
        if self._reads_twice and _bits(element) != _bits(self._read(index)):
            raise StrategyError(
                f"element {index} of the data set is different when it is read again, so a training would depend on "
                "the instance that reads it; compute its random numbers from its number, as with "
                f"np.random.default_rng([seed, {index}]), or draw from np.random, which is seeded for each element"
            )
        return element

    def _read(self, index: int) -> Element:
        self._watch.look()
        seed_for(self._seed, self._epoch, index)
        self._watch.begin()
        return self._source[index]


@contextmanager
def seeded(
    source: Data, seed: int, epoch: int, watch: DrawWatch | None = None, reads_twice: bool = False
) -> Iterator[SeededElements]:
    """Provide the `SeededElements` of an epoch inside the block, and restore the global generators afterwards."""
    watch = watch or DrawWatch(has_seen=True)
    with kept_generators():
        yield SeededElements(source, seed, epoch, watch, reads_twice)
        watch.look()


def _bits(element: Element) -> list[bytes]:
    """Return the bits of the numbers in an element, of those that NumPy can read."""
    found = []
    for leaf in trees.leaves(element):
        with suppress(TypeError):  # a tensor of PyTorch in bfloat16
            array = np.asarray(leaf)
            found += [array.tobytes()] if array.dtype != object else []
    return found


def _states() -> tuple[object, ...]:
    """Return the states of the global generators, to compare them, at a time when no other thread changes them."""
    with drawing:
        _, keys, place, *normal = np.random.get_state()  # noqa: NPY002
        torch = _generator_of_torch()
        of_torch = None if torch is None else torch.get_state().numpy().tobytes()
        return random.getstate(), np.asarray(keys).tobytes(), place, *normal, of_torch


def _generator_of_torch() -> _Generator | None:
    """Return PyTorch's generator for the CPU; None if the program has not imported PyTorch."""
    return getattr(sys.modules.get("torch"), "default_generator", None)
