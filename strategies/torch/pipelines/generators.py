"""Random numbers of the micro-batches of a pipeline, which run on threads at the same time.

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
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch._functorch.config

from strategies.torch.threads import ThreadValue

_CPU = "cpu"
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
    with _generator.being(torch.Generator().manual_seed(seed)):
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
