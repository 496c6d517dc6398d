"""PopTorch's automatic casts, `with poptorch.autocast(): ...`, by PyTorch's autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator, ExitStack
from typing import TypeVar

import torch

from popdist.switches import require_switches
from strategies.torch.threads import ThreadValue

F = TypeVar("F", bound=Callable[..., object])

_is_heeded = ThreadValue(True)


class Policy:
    """PopTorch's lists of operators by the dtypes that compute them.

    Args:
        fp16: Operators computed in float16.
        fp32: Operators computed in float32.
        promote: Operators whose arguments are cast to the widest of their dtypes.
        demote: Operators whose arguments are cast to the narrowest of their dtypes.

    Attributes:
        lists: Non-empty lists by their names.
    """

    def __init__(
        self,
        fp16: Iterable[str] = (),
        fp32: Iterable[str] = (),
        promote: Iterable[str] = (),
        demote: Iterable[str] = (),
    ) -> None:
        given = {"fp16": fp16, "fp32": fp32, "promote": promote, "demote": demote}
        self.lists: Mapping[str, list[str]] = {name: list(names) for name, names in given.items() if names}


class autocast(ContextDecorator):
    """A context or decorator that computes matrix products and convolutions in 16 bits, like `torch.autocast("cpu")`.

    Args:
        enabled: False switches the casts off.
        dtype: `torch.float16`, as on IPUs, or `torch.bfloat16`, which needs no loss scaling.

    Raises:
        TypeError: If `enabled` is not True or False.

    Example::

        with poptorch.autocast():
            hidden = torch.nn.functional.linear(rows, weights)  # float16
    """

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16) -> None:
        require_switches(enabled=enabled)
        self._enabled, self._dtype = enabled, dtype
        self._entered: list[ExitStack] = []

    def _recreate_cm(self) -> autocast:  # each call of a decorated function needs its own
        return type(self)(self._enabled, self._dtype)

    def __enter__(self) -> autocast:
        inner = ExitStack()
        inner.enter_context(torch.autocast("cpu", self._dtype, enabled=self._enabled and _is_heeded.now))
        self._entered.append(inner)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()


def heeded_by(function: F, is_heeded: bool) -> F:
    """Return a function that enables or disables `autocast` in its thread, for `Options.Precision.autocastEnabled`."""
    return function if is_heeded else _is_heeded.being(False)(function)
