"""Rows of metrics, and the sinks that take them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

PlainNumber: TypeAlias = int | float
Reading: TypeAlias = Callable[[], Mapping[str, PlainNumber]]

STEP, TIME = "step", "time"
_OURS = frozenset((STEP, TIME))
_DTYPES = ("float", "bfloat", "int", "uint", "bool")
"""With which the names of those begin that have numbers; NumPy does not know all of them."""


@final
class Row:
    """Names and numbers of one step; they are read when somebody wants them, in whichever thread.

    Args:
        step: how many steps were made then.
        read: waits for the numbers.
        time_s: when it was, in seconds since 1970; None: now.
        samples: so many elements of data all replicas have been trained on in this step.
        is_training: whether it is what a training step has told; there is one such row of each step.
    """

    __slots__ = ("_read", "_values", "is_training", "samples", "step", "time_s")

    def __init__(
        self, step: int, read: Reading, time_s: float | None = None, samples: int = 0, is_training: bool = False
    ) -> None:
        self.step = step
        self.time_s = time.time() if time_s is None else time_s
        self.samples = samples
        self.is_training = is_training
        self._read: Reading | None = read
        self._values: Mapping[str, PlainNumber] = {}

    @property
    def values(self) -> Mapping[str, PlainNumber]:
        """The numbers by their names; waits until they are computed."""
        read = self._read
        if read is not None:
            found = read().items()
            self._values = {f"metric/{name}" if name in _OURS else name: number for name, number in found}
            self._read = None  # what they were read from may be large
        return self._values


class Sink(ABC):
    """A file or a service that takes rows.

    `open`, then `write` any number of times, then `close`; all in one thread, but the first `open`. What one of them
    raises never reaches the training: the sink is closed, and later opened again for the rows that it has not got.

    Attributes:
        name: of it, for messages.
        way_out: what its user can do where it fails, in words.
    """

    name: str
    way_out = "correct what keeps it from that"

    @abstractmethod
    def open(self, goes_on: bool) -> None:
        """Prepare to write; may be called again after `close`.

        Args:
            goes_on: whether it has got rows of this job before, from this instance or from one that is lost.
        """

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Write all of them, in this order; nothing of it may be left in this process when it returns."""

    @abstractmethod
    def close(self) -> None:
        """End; after an error, too."""


def reading_of(values: Mapping[str, object]) -> Reading:
    """Have values read later, where they may still be being computed; read others now.

    Raises:
        TypeError: a name is no text, or a value no number.
        ValueError: a name cannot be written on one line, or a value is no scalar.
    """
    held = {_checked(name): _held(name, value) for name, value in values.items()}

    def read() -> dict[str, PlainNumber]:
        return {name: value if isinstance(value, int | float) else _number(value) for name, value in held.items()}

    return read


def is_scalar(value: object) -> bool:
    """Return whether a value is a number, or an array of one."""
    is_number = isinstance(value, int | float) or str(getattr(value, "dtype", "")).startswith(_DTYPES)
    return is_number and getattr(value, "shape", ()) == ()


def _checked(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric is {name!r}, which is no text; name it by a string")
    if not name.strip() or not name.isprintable():
        raise ValueError(f"the name of a metric is {name!r}, which cannot be read in one line; name it otherwise")
    return name


def _held(name: str, value: Any) -> Any:
    """Return a number; or an array that is still to be computed: JAX's, which never changes."""
    if isinstance(value, int | float):
        return _number(value)
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if tuple(shape) != ():
        raise ValueError(
            f"metric {name!r} has the shape {list(shape)}, and sinks take one number for each name; log its mean, or "
            "its elements under names of their own"
        )
    if hasattr(value, "is_ready") and str(dtype).startswith(_DTYPES):
        return value
    try:
        return _number(value.item())
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"metric {name!r} is a {type(value).__name__}, which is no number; log numbers, or arrays of one element"
        ) from None


def _number(value: Any) -> PlainNumber:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool):
        return int(plain)
    if isinstance(plain, int):
        return plain
    if isinstance(plain, complex):
        raise TypeError
    return float(plain)
