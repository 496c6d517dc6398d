"""The generators of the process, from which replicas and micro-batches draw.

A replica draws from PyTorch's generators for the CPU and for its device, from Python's `random`, and from NumPy's
global generator. They are seeded for each micro-batch. After the step they have the states that the program left.

In a pipeline micro-batches run at the same time, but PyTorch has one generator for the CPU, from which `dropout`,
`torch.rand` and similar operators draw in every thread. So the thread of a micro-batch has a generator of its own, and
operators draw from that, unless the program passes one. This holds for
calls from C++, too (dropout between the layers of an LSTM, inside of attention), and for backward passes.

PyTorch's dispatcher first asks the keys that are switched on for a thread. This module registers kernels under an
otherwise unused key, for the operators that take a generator. All other operators fall through, at no cost. A thread
draws the numbers that a process draws after `torch.manual_seed` with the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch._functorch.config
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
from strategies.torch.tensors import ThreadValue

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
        there = torch.get_device_module(device)
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
    here = lifted()
    there = None if device.type == _CPU else torch.get_device_module(device).get_rng_state(device)
    return AllStates(device, here, there)


def lay_all(states: AllStates) -> None:
    """Give all generators the states that `lift_all` has taken away."""
    lay(states.here)
    if states.there is not None:
        torch.get_device_module(states.device).set_rng_state(states.there, states.device)


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
        drawing.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let other replicas compute in the code inside, which waits for them."""
        drawing.release()
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
        drawing.acquire()
        if (other := _process.computing) not in (None, self):
            assert other is not None
            with torch._C.DisableTorchFunction():  # a mode of this thread must not see what the other replica does
                other._states, other._come_back = lift_all(other._device), other._leave()
        _process.computing = self


@dataclass
class _ReplicasOfProcess:
    """The replicas of this process. The one that computes holds `drawing`.

    Attributes:
        computing: The replica that has computed last, and has not ended.
        steps: The number of steps that have begun and not ended.
        of_program: The states of the program's generators meanwhile.
    """

    computing: Baton | None = None
    steps: int = 0
    of_program: AllStates | None = None


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
    with drawing:
        if not _process.steps:
            _process.of_program = lift_all(device)
            of_program.kept = _process.of_program.here
        _process.steps += 1
    try:
        yield
    finally:
        with drawing:
            _process.steps -= 1
            if not _process.steps and _process.of_program is not None and of_program.kept is not None:
                lay_all(_process.of_program._replace(here=of_program.kept))
                of_program.kept = None


# ---- micro-batches that run at the same time

_KEY = "TESTING_ONLY_GenericMode"
_OF_INDUCTOR = {"randint.low_out": "randint.low_generator_out"}
"""Operators that draw seeds in compiled code. The first call runs in a dispatch mode, which ignores `_KEY`."""

_include = torch._C._dispatch_tls_set_dispatch_key_included

_generator = ThreadValue[torch.Generator | None](None)
_DEFAULT = "default_generator"  # a name that PyTorch's stubs lack
_installing = threading.Lock()
_installed: list[object] = []  # the libraries; without references their kernels would be removed


@contextmanager
def drawing_in_thread(seed: int) -> Iterator[None]:
    """Make this thread draw all random numbers of PyTorch on the CPU from a generator with this seed."""
    _install()
    torch._functorch.config.check_custom_op_aliasing = False  # per thread; if True, compiled code skips `_KEY`
    with _generator.using(torch.Generator().manual_seed(seed)):
        _include(_KEY, True)
        try:
            yield
        finally:
            _include(_KEY, False)


def _install() -> None:
    """Register the kernels with the dispatcher, once."""
    with _installing:
        if _installed:
            return
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        _installed.extend([everything, aten])
        everything.fallback(torch.library.fallthrough_kernel, _KEY)
        for name in (one for one in torch._C._dispatch_get_all_op_names() if one.startswith("aten::")):
            base, _, overload = name.partition(".")
            if _generator_argument(torch._C._get_schema(base, overload)) is not None:
                aten.impl(name.removeprefix("aten::"), _drawing(name.removeprefix("aten::")), _KEY)
        for name, with_generator in _OF_INDUCTOR.items():
            aten.impl(name, _drawing(with_generator), _KEY)
        setattr(torch.random, _DEFAULT, _GeneratorOfThread(getattr(torch.random, _DEFAULT)))


class _GeneratorOfThread:
    """A stand-in for the default generator: the thread's generator if it has one, else that of the process.

    `torch.get_rng_state` and similar functions use it. `torch.utils.checkpoint` saves and restores the state with them,
    so that a recomputed forward pass draws the same numbers.
    """

    def __init__(self, of_process: object) -> None:
        self._of_process = of_process

    def __getattr__(self, name: str) -> Any:
        return getattr(_generator.now or self._of_process, name)


def _generator_argument(schema: torch._C.FunctionSchema) -> int | None:
    """Return the position of the generator among the arguments; None if there is none."""
    kinds = [str(argument.type) for argument in schema.arguments]
    return next((number for number, kind in enumerate(kinds) if "Generator" in kind), None)


def _drawing(name: str) -> Callable[..., Any]:
    """Return the operator, with the generator of the thread if none is given."""
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    place = _generator_argument(operator._schema)
    assert place is not None
    argument = operator._schema.arguments[place].name

    def draw(*arguments: object, **named: object) -> object:
        _include(_KEY, False)  # inner kernels must draw from the given generator, not come back here
        try:
            given = arguments[place] if len(arguments) > place else named.get(argument)
            if given is None and _draws_on_cpu(arguments, named):
                given = _generator.now
            if len(arguments) > place:
                return operator(*arguments[:place], given, *arguments[place + 1 :], **named)
            return operator(*arguments, **(named | {argument: given}))
        finally:
            _include(_KEY, True)

    return draw


def _draws_on_cpu(arguments: Sequence[object], named: Mapping[str, object]) -> bool:
    """Return whether an operator draws on the CPU, by its device argument, or else by its first tensor's device."""
    device = named.get("device")
    if isinstance(device, torch.device | str | int):
        return bool(torch.device(device).type == _CPU)
    tensors = (one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor))
    return all(one.device.type == _CPU for one in islice(tensors, 1))
