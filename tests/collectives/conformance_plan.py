"""Which statements are checked where: all of them once for each transport, else where they can come out differently."""

from __future__ import annotations

from collections.abc import Sequence

import conformance
import conformance_checks
import conformance_grouped
import conformance_horovod
import conformance_named
from statements import About, Statement

SINGLE, RING, WINDOW, GRPC, HOROVOD = "single", "ring", "window", "grpc", "horovod"
MECHANISMS = (RING, WINDOW)
HOSTS = "window and ring"
"""Ranks on two hosts, of which the last one has one: messages through shared memory, and others."""
SUITES = (conformance.suite, conformance_checks.suite, conformance_grouped.suite, conformance_named.suite)

DTYPES_ON_NETWORKS = ("int8", "int16", "float16", "bfloat16", "float32", "float64")
"""Where arrays travel as bytes: one dtype of each width, and the floats that are added in a wider one."""
DTYPES_AT_OTHER_SIZES = ("bfloat16", "float32")
"""One that is added in a wider one, and one that is not."""

USUAL_SIZES = {RING: 3, WINDOW: 3, HOSTS: 3, GRPC: 3, HOROVOD: 2}
"""How many processes the default tier has: enough for all that a transport may do in its own way."""


def statements_for(size: int, transport: str, *, complete: bool) -> list[Statement]:
    """What is checked over a network between `size` processes: everything only once for each transport.

    Between hosts there are the window and the ring, each of which is checked wholly where there is nothing else.
    """
    suites = (*SUITES, conformance_horovod.suite) if transport == HOROVOD else SUITES
    statements = [statement for suite in suites for statement in suite.statements if statement.at_least <= size]
    if size != USUAL_SIZES[transport]:
        return [each for each in statements if is_its_own_case(each) and may_depend_on_the_size(each)]
    if complete and transport != HOSTS:
        return statements
    return [each for each in statements if is_its_own_case(each)]


def is_its_own_case(statement: Statement) -> bool:
    """Whether a statement may be wrong over a network although it is right on threads."""
    if statement.about is About.DTYPES:
        return statement.value in DTYPES_ON_NETWORKS
    if statement.about is About.NUMBERS:
        return statement.is_first
    return statement.about is not About.ARGUMENTS


def may_depend_on_the_size(statement: Statement) -> bool:
    """Whether a statement may be wrong between fewer or more processes although it is right between the usual ones."""
    if statement.about is About.DTYPES:
        return statement.value in DTYPES_AT_OTHER_SIZES
    return statement.about is not About.CALLS or statement.is_first


def groups_of_threads(statement: Statement, *, complete: bool) -> Sequence[tuple[str, int]]:
    """The mechanisms and sizes of the groups of threads of which it is checked."""
    if statement.about is About.ARGUMENTS:
        groups = [(RING, 3)]
    elif complete and statement.about is not About.DTYPES:
        groups = [(mechanism, size) for mechanism in MECHANISMS for size in (1, 2, 3, 4)] + [(HOSTS, 3), (HOSTS, 4)]
    elif complete or statement.about in (About.TRANSPORT, About.CALLS):
        groups = [(mechanism, size) for mechanism in MECHANISMS for size in (2, 3)] + [(HOSTS, 3)]
    else:
        groups = [(RING, 3), (WINDOW, 2)]
    return [(mechanism, size) for mechanism, size in groups if size >= statement.at_least]


def hosts_of(mechanism: str, size: int) -> Sequence[str]:
    """The host of each rank, where they are not all on one."""
    return ["here"] * (size - 1) + ["there"] if mechanism == HOSTS else ()


def setting_of(mechanism: str) -> str:
    """What makes a communicator have it."""
    return WINDOW if mechanism == HOSTS else mechanism
