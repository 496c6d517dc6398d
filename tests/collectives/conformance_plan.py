"""The choice of statements for each transport: all of them once, elsewhere only transport-specific ones."""

from __future__ import annotations

from collections.abc import Sequence

import conformance
import conformance_checks
import conformance_forks
import conformance_grouped
import conformance_horovod
import conformance_named
from statements import About, Statement

SINGLE, RING, WINDOW, GRPC, HOROVOD = "single", "ring", "window", "grpc", "horovod"
MECHANISMS = (RING, WINDOW)
HOSTS = "window and ring"
"""Ranks on two hosts, the last one alone: messages through shared memory, and others."""
SUITES = (
    conformance.suite,
    conformance_checks.suite,
    conformance_grouped.suite,
    conformance_named.suite,
    conformance_forks.suite,
)

DTYPES_ON_NETWORKS = ("int8", "int16", "float16", "bfloat16", "float32", "float64")
"""The dtypes for networks, where arrays travel as bytes: one of each width, and floats added in a wider type."""
DTYPES_AT_OTHER_SIZES = ("bfloat16", "float32")
"""The dtypes for other sizes: one added in a wider type, and one added in its own."""

USUAL_SIZES = {RING: 3, WINDOW: 3, HOSTS: 3, GRPC: 3, HOROVOD: 2}
"""The numbers of processes of the default tier, enough for all transport-specific behaviour."""


def statements_for(size: int, transport: str, *, complete: bool) -> list[Statement]:
    """Return the statements to check over a network between `size` processes: everything only once for each transport.

    Window and ring, which together connect hosts, are each checked completely on their own.
    """
    suites = (*SUITES, conformance_horovod.suite) if transport == HOROVOD else SUITES
    statements = [statement for suite in suites for statement in suite.statements if statement.at_least <= size]
    if size != USUAL_SIZES[transport]:
        return [each for each in statements if is_its_own_case(each) and may_depend_on_the_size(each)]
    if complete and transport != HOSTS:
        return statements
    return [each for each in statements if is_its_own_case(each)]


def is_its_own_case(statement: Statement) -> bool:
    """Return whether a statement may fail over a network although it holds on threads."""
    if statement.about is About.DTYPES:
        return statement.value in DTYPES_ON_NETWORKS
    if statement.about is About.NUMBERS:
        return statement.is_first
    return statement.about is not About.ARGUMENTS


def may_depend_on_the_size(statement: Statement) -> bool:
    """Return whether a statement may fail for another number of processes although it holds for the usual one."""
    if statement.about is About.DTYPES:
        return statement.value in DTYPES_AT_OTHER_SIZES
    return statement.about is not About.CALLS or statement.is_first


def groups_of_threads(statement: Statement, *, complete: bool) -> Sequence[tuple[str, int]]:
    """Return the mechanisms and sizes of the thread groups that check a statement."""
    if statement.about is About.ARGUMENTS:
        groups = [(RING, 3)]
    elif complete and statement.about is not About.DTYPES:
        groups = [(mechanism, size) for mechanism in MECHANISMS for size in (1, 2, 3, 4)] + [(HOSTS, 3), (HOSTS, 4)]
    elif complete or statement.about in (About.TRANSPORT, About.CALLS):
        groups = [(mechanism, size) for mechanism in MECHANISMS for size in (2, 3)] + [(HOSTS, 3)]
    else:
        groups = [(RING, 3), (WINDOW, 2)]
    return [(mechanism, size) for mechanism, size in groups if size >= statement.at_least]


def groups_without_the_kernel(statement: Statement, *, complete: bool) -> Sequence[tuple[str, int]]:
    """Return the mechanisms and sizes of the thread groups that check a statement without the native kernel.

    By default this is one small group over the window. There NumPy does what the kernel does otherwise.
    """
    if complete:
        return groups_of_threads(statement, complete=True)
    depends_on_it = statement.about is not About.ARGUMENTS and (
        statement.about is not About.DTYPES or statement.is_first
    )
    return [(WINDOW, 2)] if depends_on_it and statement.at_least <= 2 else []


def hosts_of(mechanism: str, size: int) -> Sequence[str]:
    """Return the host of each rank, or nothing if all are on one host."""
    return ["here"] * (size - 1) + ["there"] if mechanism == HOSTS else ()


def setting_of(mechanism: str) -> str:
    """Return the setting that gives a communicator the mechanism."""
    return WINDOW if mechanism == HOSTS else mechanism
