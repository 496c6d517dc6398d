"""Who is waited for in vain, and who is stuck: found by looking at the instances from time to time. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from poprun.ipc.facts import Facts, Verdict
from poprun.supervisor.diagnosis import (
    Wait,
    describe_failure,
    find_stuck,
    judge,
    judge_missing,
    judge_stuck,
    vain_waits,
)
from poprun.supervisor.standstill import find_absent, find_halt, find_stopped

BLIND_S = 5.0
"""After such a pause between two looks, as when poprun was stopped itself, nobody is taken to be stuck at once; with a
short limit after a pause of half of it."""


class Lookout:
    """Compares each look with those before it.

    Args:
        stuck_timeout_s: how long an instance that others wait for may do nothing; 0: for ever.
        here: the host of mpirun.
        begin_s: when the job has begun.

    Attributes:
        in_vain: the waits for instances that have left, if two looks in a row have seen them.
        stuck: the instance that is stuck, once there is one.
        halt: why the job does not get on though no instance is known to be stuck, once that is so.
    """

    def __init__(self, stuck_timeout_s: float, here: str, begin_s: float) -> None:
        self.in_vain: frozenset[Wait] = frozenset()
        self.stuck: int | None = None
        self.halt: Verdict | None = None
        self._stuck_timeout_s = stuck_timeout_s
        self._here = here
        self._waits: frozenset[Wait] = frozenset()
        self._looked_at_s = self._heeded_s = self._mpirun_ran_at_s = begin_s

    @property
    def useless(self) -> set[int]:
        """Instances that live, or have ended well, and are of no help to those that wait for them."""
        return {gone for _, gone, _ in self.in_vain} | ({self.stuck} if self.stuck is not None else set())

    def look(self, facts: Sequence[Facts], now_s: float, is_behind: bool, is_mpirun_stopped: bool = False) -> None:
        """Compare what instances have answered to the last question with what they did before.

        Args:
            facts: one entry for each instance, in order.
            now_s: on the clock of `time.monotonic`.
            is_behind: whether instances may be waiting for their output to be read.
            is_mpirun_stopped: whether a signal has stopped mpirun.
        """
        waits = vain_waits(facts)
        self.in_vain = waits & self._waits
        self._waits = waits
        limit_s = self._stuck_timeout_s
        blind_s = min(BLIND_S, limit_s / 2)
        if is_behind or now_s - self._looked_at_s > blind_s:
            self._heeded_s = now_s
        self._looked_at_s = now_s
        if not is_mpirun_stopped:
            self._mpirun_ran_at_s = now_s
        if limit_s and not self.in_vain and now_s - self._heeded_s >= limit_s:
            self.stuck = self._find_stuck(facts, now_s, blind_s)
            if self.stuck is None:
                self.halt = find_halt(facts, now_s, limit_s, now_s - self._mpirun_ran_at_s)

    def _find_stuck(self, facts: Sequence[Facts], now_s: float, blind_s: float) -> int | None:
        limit_s = self._stuck_timeout_s
        for find in (find_stopped, find_stuck, find_absent):
            stuck = find(facts, now_s, limit_s)
            if stuck is not None and now_s - facts[stuck].answered_at_s <= blind_s:  # or it may have gone on
                return stuck
        return None

    def forget(self, now_s: float) -> None:
        """The others go on without those who were found; who has waited for them has to have time to do so."""
        self.in_vain, self.stuck, self.halt = frozenset(), None, None
        self._heeded_s = now_s

    def describe(self, failed: Facts, facts: Sequence[Facts]) -> str:
        """A line about an instance without which the others go on."""
        if failed.index == self.stuck:
            return judge_stuck(facts, failed.index, self._stuck_timeout_s).lines[0]
        return describe_failure(failed, facts)

    def judge(self, facts: Sequence[Facts], mpirun_status: int | None) -> Verdict:
        """The verdict over a job that has failed."""
        if self.stuck is not None:
            return judge_stuck(facts, self.stuck, self._stuck_timeout_s)
        return self.halt or judge(facts, self._here, self.in_vain) or judge_missing(facts, mpirun_status)
