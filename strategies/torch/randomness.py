"""Random numbers of replicas that run on threads of one process.

PyTorch has one generator for the CPU. In every thread `dropout`, `torch.rand` and similar operators draw from it. Here
a thread may have a generator of its own, and operators draw from that, unless the program passes one. This holds for
calls from C++, too (dropout between the layers of an LSTM, inside of attention), and for backward passes.

PyTorch's dispatcher first asks the keys that are switched on for a thread. This module registers kernels under an
otherwise unused key, for the operators that take a generator. All other operators fall through, at no cost. A thread
draws the numbers that a process draws after `torch.manual_seed` with the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
import torch._functorch.config

from strategies.data.randomness import seed_from
from strategies.errors import StrategyError
from strategies.torch.threads import ThreadValue

_CPU = torch.device("cpu")
_KEY = "TESTING_ONLY_GenericMode"
_OF_INDUCTOR = {"randint.low_out": "randint.low_generator_out"}
"""Operators that draw seeds in compiled code. The first call runs in a dispatch mode, which ignores `_KEY`."""

_include, _is_included = (
    torch._C._dispatch_tls_set_dispatch_key_included,
    torch._C._dispatch_tls_is_dispatch_key_included,
)

_generator = ThreadValue[torch.Generator | None](None)
_replica = ThreadValue[int | None](None)
_drawn_by: dict[int, tuple[int, torch.Generator]] = {}
"""The first replica that drew from a generator of the program, by the generator's address. The generator is kept, so
that no other generator can get its address."""
_MOST_KEPT = 256
_ADDRESS, _DEFAULT = "_cdata", "default_generator"  # names that PyTorch's stubs lack
_installing = threading.Lock()
_installed: list[object] = []  # the libraries; without references their kernels would be removed


def seed_of(seed: int, replica: int, step: int, micro_batch: int = 0) -> int:
    """Return the seed of a replica's random numbers for one micro-batch of one step.

    After `torch.manual_seed` with it, plain PyTorch draws the replica's numbers. PyTorch's generator for the CPU uses
    the lower 32 of the 64 bits.

        torch.manual_seed(strategies.torch.seed_of(seed, replica=0, step=7))

    Args:
        seed: The seed of the training.
        replica: The global index of the replica.
        step: The number of updates before.
        micro_batch: The number of the micro-batch in the step.
    """
    return seed_from(seed, replica, step, micro_batch)


@contextmanager
def drawing_from(seed: int, device: torch.device = _CPU, replica: int | None = None) -> Iterator[None]:
    """Make this thread draw all random numbers of PyTorch on the CPU from a generator with this seed.

    Args:
        seed: The seed of the generator.
        device: A further device on which the thread computes. An accelerator has one generator per process, which
            gets the same seed.
        replica: The replica for which the thread computes. If given, generators of the program that several replicas
            draw from are refused.
    """
    if device.type != _CPU.type:
        accelerator: Any = torch.get_device_module(device)
        getattr(accelerator, "manual_seed_all", accelerator.manual_seed)(seed)
    with _replica.being(replica), drawing_by(torch.Generator().manual_seed(seed)):
        yield


def drawing_by(generator: torch.Generator) -> AbstractContextManager[None]:
    """Make this thread draw all random numbers of PyTorch on the CPU from a generator, whose state advances."""
    return _Drawing(generator)


class _Drawing(AbstractContextManager[None]):
    """The context of `drawing_by`; a generator would take twice as long."""

    def __init__(self, generator: torch.Generator) -> None:
        self._being = _generator.being(generator)

    def __enter__(self) -> None:
        _install()
        # Per thread; if it is True, compiled code skips `_KEY`.
        torch._functorch.config.check_custom_op_aliasing = False
        self._was_included = _generator.now is not None
        self._being.__enter__()
        _include(_KEY, True)

    def __exit__(self, *error: object) -> None:
        self._being.__exit__(*error)
        _include(_KEY, self._was_included)


def _install() -> None:
    """Register the kernels with the dispatcher, once."""
    with _installing:
        if _installed:
            return
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        _installed.extend([everything, aten])
        everything.fallback(torch.library.fallthrough_kernel, _KEY)
        for name in _names_of_random_operators():
            aten.impl(name, _drawing(name), _KEY)
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


def _names_of_random_operators() -> list[str]:
    """Return the names of the operators that take a generator, without `aten::`."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name.removeprefix("aten::") for name in names if _generator_argument(_schema(name)) is not None]


def _schema(name: str) -> torch._C.FunctionSchema:
    base, _, overload = name.partition(".")
    return torch._C._get_schema(base, overload)


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
            if isinstance(given, torch.Generator):
                _refuse_to_share(given)
            elif draws_on_cpu(arguments, named):  # an accelerator has a generator of its own
                given = _generator.now
            if len(arguments) > place:
                return operator(*arguments[:place], given, *arguments[place + 1 :], **named)
            return operator(*arguments, **(named | {argument: given}))
        finally:
            _include(_KEY, True)

    return draw


def _refuse_to_share(generator: torch.Generator) -> None:
    """Raise if another replica has drawn from this generator: the numbers would depend on the order of threads."""
    replica = _replica.now
    if replica is None or _is_default_of_accelerator(generator):
        return
    if len(_drawn_by) > _MOST_KEPT:
        _drawn_by.clear()
    other, _ = _drawn_by.setdefault(_address_of(generator), (replica, generator))
    if other != replica:
        raise StrategyError(
            f"replicas {other} and {replica} draw from one torch.Generator, so their numbers would depend on the "
            "order of threads; leave the generator out, because each replica has its own, or construct one in loss_fn"
        )


def _is_default_of_accelerator(generator: torch.Generator) -> bool:
    """Return whether this is the generator of an accelerator, which `drawing_from` seeds for each replica.

    CUDA kernels pass it explicitly, as for dropout between the layers of a GRU.
    """
    if generator.device.type == _CPU.type:
        return False
    generators = getattr(torch.get_device_module(generator.device), "default_generators", ())  # MPS has none
    return any(_address_of(each) == _address_of(generator) for each in generators)


def _address_of(generator: torch.Generator) -> int:
    return int(getattr(generator, _ADDRESS))


def draws_on_cpu(arguments: Sequence[object], named: Mapping[str, object]) -> bool:
    """Return whether an operator draws on the CPU, by its device argument, or else by its first tensor's device."""
    device = named.get("device")
    if isinstance(device, torch.device | str | int):
        return bool(torch.device(device).type == _CPU.type)
    tensors = (one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor))
    return all(one.device.type == _CPU.type for one in islice(tensors, 1))
