"""Rows of metrics, and the sinks that take them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, final

from strategies.sinks.distribution import Distribution

PlainNumber: TypeAlias = int | float
Reading: TypeAlias = Callable[[], Mapping[str, PlainNumber]]

STEP, TIME = "step", "time"
NO_DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType({})
_OURS = frozenset((STEP, TIME))
_DTYPES = ("float", "bfloat", "int", "uint", "bool")
"""The beginnings of the names of number dtypes; NumPy does not know all of these dtypes."""


@final
class Row:
    """The names and numbers of one step. A sink's thread reads the numbers when it writes them.

    Args:
        step: Number of steps made so far.
        read: Function that waits for the numbers and returns them.
        time_s: Time of the step in seconds since 1970; None: now.
        samples: Elements of data that all replicas have been trained on in this step.
        is_training: Whether a training step made this row; each step has exactly one such row.
        distributions: Distributions of weights and gradients by name; empty in most rows.

    Attributes:
        distributions: The given ones, or none if too many rows wait.
    """

    __slots__ = ("_read", "_values", "distributions", "is_training", "samples", "step", "time_s")

    def __init__(
        self,
        step: int,
        read: Reading,
        time_s: float | None = None,
        samples: int = 0,
        is_training: bool = False,
        distributions: Mapping[str, Distribution] = NO_DISTRIBUTIONS,
    ) -> None:
        self.step = step
        self.time_s = time.time() if time_s is None else time_s
        self.samples = samples
        self.is_training = is_training
        self.distributions = distributions
        self._read: Reading | None = read
        self._values: Mapping[str, PlainNumber] = {}

    @property
    def values(self) -> Mapping[str, PlainNumber]:
        """The numbers by their names; waits until they are computed."""
        read = self._read
        if read is not None:
            found = read().items()
            self._values = {f"metric/{name}" if name in _OURS else name: number for name, number in found}
            self._read = None  # the arrays that it read may be large
        return self._values

    @property
    def all_values(self) -> Mapping[str, PlainNumber]:
        """The numbers, and those of the distributions as `gradients/dense/p50`, for sinks without histograms."""
        if not self.distributions:
            return self.values
        of_all = self.distributions.items()
        found = {f"{name}/{each}": number for name, of_one in of_all for each, number in of_one.numbers.items()}
        return {**self.values, **{name: number for name, number in found.items() if name not in self.values}}

    def without_distributions(self) -> Row:
        """Return a row with the same numbers, but without distributions, which it does not keep alive."""
        values = self._values
        read = self._read or (lambda: values)
        return Row(self.step, read, self.time_s, self.samples, self.is_training)


class Sink(ABC):
    """A file or a service that takes rows.

    The order of calls is `open`, any number of `write`, `close`. The job's sinks make the first `open` in the caller's
    thread, and all other calls in one thread of their own. If a later call raises, the training goes on: the sink is
    closed, opened again after a while, and given the same rows once more.

    Attributes:
        name: Name for messages.
        way_out: Advice to the user for messages about a failure.
    """

    name: str
    way_out = "correct the cause"

    @abstractmethod
    def open(self, goes_on: bool) -> None:
        """Prepare to write. May be called again after `close`.

        Args:
            goes_on: Whether the sink has received rows of this job before, from this instance or from a lost one.

        Raises:
            Exception: Any. `close` is called afterwards.
        """

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Write all rows, in this order, without leaving any in a buffer of this process.

        Args:
            rows: At least one row; not changed.

        Raises:
            Exception: Any. Rows may have been written in part; the next `write` gets all of them again.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file or connection. Called also after an error, and after an `open` that failed."""


def reading_of(values: Mapping[str, object]) -> Reading:
    """Return a function that returns the values: numbers are read now, JAX arrays when the function is called.

    Raises:
        TypeError: A name is not a string, or a value is not a number.
        ValueError: A name cannot be written on one line, or a value is not a scalar.
    """
    held = {_checked(name): _held(name, value) for name, value in values.items()}

    def read() -> dict[str, PlainNumber]:
        return {name: value if isinstance(value, int | float) else _number(value) for name, value in held.items()}

    return read


def is_scalar(value: object) -> bool:
    """Return whether a value is a number, or an array of no axes with a number."""
    is_number = isinstance(value, int | float) or str(getattr(value, "dtype", "")).startswith(_DTYPES)
    return is_number and getattr(value, "shape", ()) == ()


def _checked(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric is {name!r}, which is not a string; use a string")
    if not name.strip() or not name.isprintable():
        raise ValueError(f"the name of a metric is {name!r}, which is empty or not printable; use another name")
    return name


def _held(name: str, value: Any) -> Any:
    """Return a number, or a JAX array, which never changes, to be read when it has been computed."""
    if isinstance(value, int | float):
        return _number(value)
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if tuple(shape) != ():
        raise ValueError(
            f"metric {name!r} has the shape {list(shape)}, but sinks take one number per name; log its mean, or "
            "give each element a name"
        )
    if hasattr(value, "is_ready") and str(dtype).startswith(_DTYPES):
        return value
    try:
        return _number(value.item())
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"metric {name!r} is a {type(value).__name__}, which is not a number; log numbers, or arrays of one element"
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
