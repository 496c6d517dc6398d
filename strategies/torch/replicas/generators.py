"""The generators of the process, from which replicas draw one after another.

A replica draws from PyTorch's generators for the CPU and for its device, from Python's `random`, and from NumPy's
global generator. They are seeded for each micro-batch. After the step they have the states that the program left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias, final

import torch
from typing_extensions import override

from strategies.data.randomness import (
    GeneratorStates,
    drawing,
    lay,
    lifted,
    of_program,
    seed_from,
    seed_python_and_numpy,
)
from strategies.torch.threads import ThreadValue

_CPU = "cpu"


def seed_of(seed: int, replica: int, step: int, micro_batch: int = 0) -> int:
    """Return the seed of a replica's random numbers for one micro-batch of one step.

    After `torch.manual_seed` with it, plain PyTorch draws the replica's numbers. PyTorch's generator for the CPU uses
    the lower 32 of the 64 bits, and so does NumPy's; Python's `random` uses all.

        torch.manual_seed(strategies.torch.seed_of(seed, replica=0, step=7))

    Args:
        seed: The seed of the training.
        replica: The global index of the replica.
        step: The number of updates before.
        micro_batch: The number of the micro-batch in the step.
    """
    return seed_from(seed, replica, step, micro_batch)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all generators from which code on this device draws. Call it inside of `kept_generators`."""
    torch.default_generator.manual_seed(seed)
    seed_python_and_numpy(seed)
    if device.type != _CPU:
        there = _accelerator(device)
        getattr(there, "manual_seed_all", there.manual_seed)(seed)


class AllStates(NamedTuple):
    """The states of all generators from which code on a device draws.

    Attributes:
        device: The device.
        here: The states of the host's generators.
        there: The state of the device's generator; None for the CPU.
    """

    device: torch.device
    here: GeneratorStates
    there: torch.Tensor | None


def lift_all(device: torch.device) -> AllStates:
    """Take the states of all generators away, as `lifted` does, and return them."""
    return AllStates(device, lifted(), None if device.type == _CPU else _accelerator(device).get_rng_state(device))


def lay_all(states: AllStates) -> None:
    """Give all generators the states that `lift_all` has taken away."""
    lay(states.here)
    if states.there is not None:
        _accelerator(states.device).set_rng_state(states.there, states.device)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Let the code inside draw from generators with this seed. Afterwards they go on as if it had drawn nothing."""
    with ExitStack() as stack:
        if has_baton():
            stack.callback(lay_all, lift_all(device))
        else:
            stack.enter_context(kept_generators(device))
            stack.enter_context(Baton(device))
        seed_generators(seed, device)
        yield


def are_equal(one: AllStates, other: AllStates) -> bool:
    """Return whether generators with these states would draw the same numbers."""
    here, there = one.here, other.here
    if here.of_python != there.of_python or str(here.of_numpy.state) != str(there.of_numpy.state):
        return False
    tensors = (here.of_torch, there.of_torch), (one.there, other.there)
    return all(mine is None or bool((mine.numpy() == its.numpy()).all()) for mine, its in tensors if its is not None)


def _accelerator(device: torch.device) -> Any:
    """Return a module like `torch.cuda`, with one generator for each device."""
    return torch.get_device_module(device)


# ---- one replica at a time

ComeBack: TypeAlias = Callable[[], object]
"""Gives the process the state of a replica again."""

Leave: TypeAlias = Callable[[], ComeBack]
"""Takes the state of a replica away, for another one that begins to compute, and returns the way back."""


@final
class Baton(AbstractContextManager[None]):
    """The right to compute, and to draw from the generators of the process, which one replica has at a time.

    A process may drive replicas on several threads: those of a module whose layers wait for other replicas, and those
    of instances that share a process. A replica that waits lends its baton. If another replica computes meanwhile, it
    first takes the state of the waiting one away.

    Args:
        device: The device of the replica.
        leave: Takes the state away that the replica has besides the generators.
    """

    def __init__(self, device: torch.device, leave: Leave = lambda: lambda: None) -> None:
        self._device, self._leave = device, leave
        self._states: AllStates | None = None
        self._come_back: ComeBack = lambda: None

    @override
    def __enter__(self) -> None:
        self._take()
        self._before, _mine.now = _mine.now, self

    @override
    def __exit__(self, *error: object) -> None:
        _mine.now = self._before
        _process.computing = None
        _process.lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let other replicas compute in the code inside, which waits for them."""
        _process.lock.release()
        try:
            yield
        finally:
            self._take()
            if self._states is not None:
                with torch._C.DisableTorchFunction():
                    lay_all(self._states)
                    self._come_back()
                self._states = None

    def _take(self) -> None:
        _process.lock.acquire()
        if (other := _process.computing) not in (None, self):
            assert other is not None
            with torch._C.DisableTorchFunction():  # a mode of this thread must not see what the other replica does
                other._states, other._come_back = lift_all(other._device), other._leave()
        _process.computing = self


class _ReplicasOfProcess:
    """The replicas of this process.

    Attributes:
        lock: Held by the replica that computes.
        computing: The replica that has computed last, and has not ended.
        steps: The number of steps that have begun and not ended.
        of_program: The states of the program's generators meanwhile.
    """

    def __init__(self) -> None:
        self.lock = drawing
        self.computing: Baton | None = None
        self.steps = 0
        self.of_program: AllStates | None = None


of_program.has_others = True
_process = _ReplicasOfProcess()
_mine = ThreadValue[Baton | None](None)


def has_baton() -> bool:
    """Return whether this thread computes in a replica's turn, which has seeded the generators."""
    return _mine.now is not None


def lent_baton() -> AbstractContextManager[None]:
    """Return a context in which this thread waits for other replicas, and lends its baton if it has one."""
    return nullcontext() if _mine.now is None else _mine.now.lent()


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Give the program's states back to all generators after the code inside, in which replicas seed them.

    If a thread of the process is inside already, as another instance may be, the last one to leave gives them back.
    """
    with _process.lock:
        if not _process.steps:
            _process.of_program = lift_all(device)
            of_program.kept = _process.of_program.here
        _process.steps += 1
    try:
        yield
    finally:
        with _process.lock:
            _process.steps -= 1
            if not _process.steps and _process.of_program is not None and of_program.kept is not None:
                lay_all(_process.of_program._replace(here=of_program.kept))
                of_program.kept = None
