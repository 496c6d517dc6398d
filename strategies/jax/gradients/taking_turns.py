"""The choice between one thread for all local replicas, which take turns, and a thread for each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import final

from jax.extend import core

from collectives.instruments import Instruments, is_seen
from strategies.jax.programs.jaxpr import every_equation

SHORT_S = 200e-6
"""The longest program, in seconds, for which replicas take turns although there are more cores. XLA runs the programs
that one thread dispatches one after another. A thread per replica costs 50 to 170 us of CPU time (measured with 8 and
32 replicas on 2 cores), so programs of 170 us end at the same time either way."""
TRIED = 3
"""The number of steps in turns after which a program may count as long. The shortest of them counts, because another
process may delay a step."""


@final
class TakingTurns:
    """The choice for the programs of one kind of step. It changes which thread waits, never what a program computes.

    Args:
        may_wait: Returns whether replicas need threads, because the program of one may wait for another.
        instruments: Instruments; one that sees each replica begin and end needs threads.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        may_wait: Callable[[], bool],
        instruments: Instruments,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._may_wait = may_wait
        self._instruments = instruments
        self._clock = clock
        self._may_take_turns: bool | None = None  # unknown before the first step: the program is not traced yet
        self._has_one_core = len(os.sched_getaffinity(0)) == 1
        self._shortest_s = float("inf")
        self._tried = 0
        self._began_s = 0.0

    def begin(self) -> bool:
        """Begin a step; return whether the replicas take turns."""
        if self._may_take_turns is None:
            self._may_take_turns = not (is_seen(self._instruments.replica_begins) or self._may_wait())
        self._began_s = self._clock()
        is_short = self._tried < TRIED or self._shortest_s <= SHORT_S
        return self._may_take_turns and (self._has_one_core or is_short)

    def end(self, replicas: int) -> None:
        """End a step in which the replicas took turns.

        Args:
            replicas: Number of local replicas.
        """
        self._tried += 1
        self._shortest_s = min(self._shortest_s, (self._clock() - self._began_s) / replicas)


def may_wait(closed: core.ClosedJaxpr) -> bool:
    """Return whether a program has calls of Python or of foreign functions, which may wait for another replica's."""
    return bool(closed.effects) or any(
        "callback" in equation.primitive.name or equation.primitive.name in ("debug_print", "ffi_call")
        for equation in every_equation(closed.jaxpr)
    )
