"""Statements about communicators, collected into suites for every backend."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from reference import Reduced

import collectives
from collectives import Communicator, Limits, Settings

LIMITS = Limits(stall_warning_s=5, timeout_s=60)


class About(Enum):
    """The subject of a statement; `conformance_plan` selects transports by it."""

    ARGUMENTS = "calls refused before they reach a transport: on one rank, and on one group of threads"
    DTYPES = "one dtype, which a transport moves as bytes: over networks one of each width, and the 16-bit floats"
    NUMBERS = "additions of ranks, alike over every transport: over networks the first of the cases"
    CALLS = "different calls, which all ranks compare: over networks all of them at one size, the first at others"
    TRANSPORT = "behaviour specific to a transport: over all of them"


@dataclass(frozen=True)
class Statement:
    """A statement about every communicator of at least `at_least` ranks; all ranks call `check` together.

    Attributes:
        topic: The name of the check, without its value.
        value: The argument of the check, if it is called once for each of several values.
        is_first: Whether the value is the first of them.
    """

    topic: str
    check: Callable[[Communicator], None]
    at_least: int = 1
    about: About = About.TRANSPORT
    value: Any = None
    is_first: bool = True

    @property
    def name(self) -> str:
        return self.topic if self.value is None else f"{self.topic}[{self.value}]"

    def __str__(self) -> str:
        return self.name


@dataclass
class Suite:
    """The statements of one module, in the order of definition."""

    statements: list[Statement] = field(default_factory=list)

    def add(self, check: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
        """Add a statement about groups of any size, over every transport."""
        return self.add_about(About.TRANSPORT)(check)

    def add_for_groups(self, check: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
        """Add a statement about groups of two ranks or more, over every transport."""
        return self.add_about(About.TRANSPORT, at_least=2)(check)

    def add_about(
        self, about: About, *, at_least: int = 1
    ) -> Callable[[Callable[[Communicator], None]], Callable[[Communicator], None]]:
        """Add a statement about a subject other than transports."""

        def add(check: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
            self.statements.append(Statement(check.__name__, check, at_least, about))
            return check

        return add

    def add_for_each(
        self, values: Iterable[Any], *, at_least: int = 1, about: About = About.TRANSPORT
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add one statement per value, which is the check's second argument."""

        def add(check: Callable[..., None]) -> Callable[..., None]:
            for number, value in enumerate(values):
                call, is_first = partial(_call, check, value), number == 0
                self.statements.append(Statement(check.__name__, call, at_least, about, value, is_first))
            return check

        return add


def _call(check: Callable[..., None], value: Any, communicator: Communicator) -> None:
    check(communicator, value)


def failure_of(statement: Statement, communicator: Communicator) -> str:
    """Return the traceback of a failure, or nothing."""
    try:
        statement.check(communicator)
    except BaseException:
        return traceback.format_exc()
    return ""


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, case: object = "") -> None:
    assert actual.dtype == expected.dtype, case
    assert actual.shape == expected.shape, case
    if actual.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(actual, expected, err_msg=str(case))  # shows the differences
        raise AssertionError(f"{case}: the values are equal, but not their bits")


def twin_of(communicator: Communicator) -> Communicator:
    """Return another communicator of the same ranks and backend; a collective call.

    It is a subgroup, except over Horovod, where subgroups use the MPI backend.
    """
    if communicator.mechanism == "horovod":
        return collectives.connect("horovod", Settings(limits=LIMITS))
    return communicator.subgroup(range(communicator.size))


def has_sequential_bits(communicator: Communicator, expected: Reduced, *, is_grouped: bool = False) -> bool:
    """Return whether the backend promises the bits of the sequential reduction.

    All do, except that MPI chooses the order in which Horovod adds the partial sums of the ranks. That affects floats
    with three or more contributions, in arrays too large to travel with the comparison of the calls, and all arrays
    of a group. Subgroups are communicators of another backend.
    """
    if communicator.mechanism != "horovod" or communicator.size == 1 or not expected.has_an_order:
        return True
    from collectives.backends.horovod import CARRIED_BYTES

    return expected.bits.nbytes <= CARRIED_BYTES and not is_grouped


def assert_reduced(
    communicator: Communicator, actual: np.ndarray, expected: Reduced, case: object = "", *, is_grouped: bool = False
) -> None:
    """Assert that `actual` is the sequential reduction: to the bit, or up to rounding if MPI chooses the order."""
    if has_sequential_bits(communicator, expected, is_grouped=is_grouped):
        assert_same_bits(actual, expected.bits, case)
        return
    assert actual.dtype == expected.bits.dtype, case
    assert actual.shape == expected.bits.shape, case
    distance = np.abs(actual.astype(np.float64) - expected.bits.astype(np.float64))
    too_far = ~(distance <= expected.rounding)
    assert not too_far.any(), (case, distance[too_far], expected.rounding[too_far])


def assert_all_reduced(
    communicator: Communicator, actual: np.ndarray, expected: Reduced, case: object = "", *, is_grouped: bool = False
) -> None:
    """Assert the reduction and equal bits on all ranks; a collective call if the bits are not known."""
    if not has_sequential_bits(communicator, expected, is_grouped=is_grouped):
        assert_equal_on_all_ranks(communicator, [actual], case)
    assert_reduced(communicator, actual, expected, case, is_grouped=is_grouped)


def assert_equal_on_all_ranks(communicator: Communicator, arrays: Sequence[np.ndarray], case: object = "") -> None:
    """Assert that all ranks have the same bits; a collective call."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    digests = communicator.all_gather(np.frombuffer(digest.digest(), np.uint8))
    assert len({row.tobytes() for row in digests}) == 1, f"{case}: the ranks have different results"


def texts_of_all_ranks(communicator: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks, in rank order; a collective call."""
    line = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    line[: encoded.size] = encoded
    return [bytes(row).rstrip(b"\0").decode() for row in communicator.all_gather(line)]
