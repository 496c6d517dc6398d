"""Statements about communicators, collected into suites that every backend has to pass."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from collectives import Communicator


@dataclass(frozen=True)
class Statement:
    """Something that is true of every communicator of `at_least` ranks or more; all ranks call `check` together."""

    name: str
    check: Callable[[Communicator], None]
    at_least: int = 1

    def __str__(self) -> str:
        return self.name


@dataclass
class Suite:
    """The statements of one module, in the order in which they are written."""

    statements: list[Statement] = field(default_factory=list)

    def add(self, check: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
        """A statement about groups of any size."""
        self.statements.append(Statement(check.__name__, check))
        return check

    def add_for_each(
        self, values: Sequence[Any], *, at_least: int = 1
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """One statement per value, which is the check's second argument."""

        def add(check: Callable[..., None]) -> Callable[..., None]:
            for value in values:
                name = f"{check.__name__}[{value}]"
                self.statements.append(Statement(name, partial(_call, check, value), at_least))
            return check

        return add

    def add_for_groups(self, check: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
        """A statement about groups of two ranks or more."""
        self.statements.append(Statement(check.__name__, check, at_least=2))
        return check


def _call(check: Callable[..., None], value: Any, communicator: Communicator) -> None:
    check(communicator, value)


def failure_of(statement: Statement, communicator: Communicator) -> str:
    """The traceback of what is wrong, or nothing."""
    try:
        statement.check(communicator)
    except BaseException:
        return traceback.format_exc()
    return ""


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, case: object = "") -> None:
    assert actual.dtype == expected.dtype, case
    assert actual.shape == expected.shape, case
    if actual.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(actual, expected, err_msg=str(case))  # shows where they differ
        raise AssertionError(f"{case}: the values are equal, but not their bits")


def texts_of_all_ranks(communicator: Communicator, text: str) -> list[str]:
    """The texts of all ranks, in rank order; a collective call."""
    line = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    line[: encoded.size] = encoded
    return [bytes(row).rstrip(b"\0").decode() for row in communicator.all_gather(line)]
