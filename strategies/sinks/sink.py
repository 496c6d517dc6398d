"""Rows of metrics, distributions of the numbers in arrays, and the sinks that take them.

A distribution is a histogram, quantiles, and what float16 would make of the numbers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias, final

import numpy as np

from popdist.records.watched import Waits
from strategies.typing import Tree

PlainNumber: TypeAlias = int | float
Reading: TypeAlias = Callable[[], Mapping[str, PlainNumber]]

STEP, TIME = "step", "time"
NO_DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType({})
_OURS = frozenset((STEP, TIME))
_DTYPES = ("float", "bfloat", "int", "uint", "bool")
"""The beginnings of the names of number dtypes; NumPy does not know all of these dtypes."""

BINS = 64
"""The number of bins of a histogram, as Weights & Biases has by default."""
LEVELS = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
"""The levels of the quantiles, by name."""
_FLOAT16_ZERO = 2.0**-25
"""The largest magnitude that rounds to zero in float16."""
_FLOAT16_INFINITE = 65520.0
"""The smallest magnitude that rounds to infinity in float16."""


@dataclass(frozen=True)
class JobFacts:
    """The facts about the job that sinks need.

    Attributes:
        is_chief: Returns whether this instance writes for all; an instance may become chief when others are lost.
        lost: Returns the number of lost instances.
        restarts: Number of restarts of the job.
        waits: Time that this instance has waited for others; None if it is not measured.
    """

    is_chief: Callable[[], bool] = lambda: True
    lost: Callable[[], int] = lambda: 0
    restarts: int = 0
    waits: Waits | None = None


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


# ---- distributions


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of the finite numbers in an array.

    Attributes:
        least: The smallest number; NaN if no number is finite.
        most: The largest number; NaN if no number is finite.
        counts: Numbers per bin, int64 `[BINS]`.
        edges: Edges of the bins, equally far apart, from the smallest number to the largest, float64 `[BINS + 1]`.
        quantiles: Quantiles by the names in `LEVELS`, interpolated linearly; NaN if no number is finite.
        total: Sum of the numbers.
        squares: Sum of their squares.
        not_finite: Count of NaNs and infinities, which are in no bin.
        float16_zero: Share of all numbers that are not zero but would become zero in float16.
        float16_inf: Share of all numbers that are finite but would become infinite in float16.
    """

    least: float
    most: float
    counts: np.ndarray
    edges: np.ndarray
    quantiles: Mapping[str, float]
    total: float
    squares: float
    not_finite: int
    float16_zero: float
    float16_inf: float

    @classmethod
    def of(cls, array: np.ndarray) -> Distribution:
        """Return the distribution of an array of any floating-point dtype."""
        is_known = array.dtype in (np.float32, np.float64)  # to NumPy's quantiles
        flat = (array if is_known else array.astype(np.float32)).reshape(-1)
        with np.errstate(all="ignore"):
            finite = flat[np.isfinite(flat)]
            sizes = np.abs(finite)
            counts, edges = _histogram(finite.astype(np.float64))
            is_zero, is_infinite = (sizes <= _FLOAT16_ZERO) & (sizes > 0), sizes >= _FLOAT16_INFINITE
            levels = np.quantile(finite, list(LEVELS.values())) if finite.size else np.full(len(LEVELS), np.nan)
            return cls(
                least=float(finite.min()) if finite.size else float("nan"),
                most=float(finite.max()) if finite.size else float("nan"),
                counts=counts,
                edges=edges,
                quantiles=dict(zip(LEVELS, levels.tolist(), strict=True)),
                total=float(finite.sum(dtype=np.float64)),
                squares=float(np.square(finite, dtype=np.float64).sum()),
                not_finite=flat.size - finite.size,
                float16_zero=np.count_nonzero(is_zero) / max(flat.size, 1),
                float16_inf=np.count_nonzero(is_infinite) / max(flat.size, 1),
            )

    @property
    def as_json(self) -> dict[str, object]:
        """The distribution as values of JSON, for another instance."""
        return {**asdict(self), "counts": self.counts.tolist(), "edges": self.edges.tolist()}

    @classmethod
    def from_json(cls, as_json: Tree) -> Distribution:
        """Return a distribution from `as_json`, with the same bits."""
        return cls(**{**as_json, "counts": np.array(as_json["counts"], np.int64), "edges": np.array(as_json["edges"])})

    @property
    def size(self) -> int:
        """The count of finite numbers."""
        return int(self.counts.sum())

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """The distribution without its histogram: minimum, quantiles, maximum, and the counts and shares."""
        return {
            "min": self.least,
            **self.quantiles,
            "max": self.most,
            "float16_zero": self.float16_zero,
            "float16_inf": self.float16_inf,
            "not_finite": float(self.not_finite),
        }


def _histogram(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and edges of bins that hold all of the numbers, which are finite and float64."""
    ends = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)
    try:
        counts, edges = np.histogram(numbers, BINS, ends)
    except ValueError:  # the ends are too near to each other, or too far apart, for bins of a finite size
        size = min(max(map(abs, ends)), np.finfo(np.float64).max / 4)
        size = max(size, np.finfo(np.float64).tiny * BINS)
        counts, edges = np.histogram(np.clip(numbers, -size, size), BINS, (-size, size))
    return counts.astype(np.int64), edges
