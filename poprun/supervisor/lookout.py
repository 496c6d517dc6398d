"""Detection of stuck instances and of jobs at a standstill. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from popdist.records.progress import State
from poprun.cli.wording import list_instances
from poprun.ipc.facts import Facts, Verdict
from poprun.supervisor.diagnosis import (
    STUCK_STATUS,
    Wait,
    describe_failure,
    find_stuck,
    judge,
    judge_missing,
    judge_stuck,
    vain_waits,
)

BLIND_S = 5.0
"""The longest usual pause between two looks, at most half the limit. After a longer pause, as when poprun was stopped,
waits are counted anew.
"""


class Lookout:
    """A detector that compares each look at the instances with the look before it.

    Args:
        stuck_timeout_s: The seconds for which an awaited instance may do nothing; 0 for no limit.
        here: The host of mpirun.
        begin_s: The time at which the job began.

    Attributes:
        in_vain: The waits for instances that have left, if two looks in a row have seen them.
        stuck: The index of the stuck instance; None while there is none.
        silent: The indices of sleeping spares whose agents do not answer.
        halt: The verdict on a job that does not progress although no instance is known to be stuck; None while it
            progresses.
    """

    def __init__(self, stuck_timeout_s: float, here: str, begin_s: float) -> None:
        self.in_vain: frozenset[Wait] = frozenset()
        self.stuck: int | None = None
        self.halt: Verdict | None = None
        self.silent: frozenset[int] = frozenset()
        self._stuck_timeout_s = stuck_timeout_s
        self._here = here
        self._waits: frozenset[Wait] = frozenset()
        self._looked_at_s = self._heeded_s = self._mpirun_ran_at_s = begin_s

    @property
    def useless(self) -> set[int]:
        """The indices of instances that have left or are stuck while others wait, and of spares that do not answer."""
        return {gone for _, gone, _ in self.in_vain} | ({self.stuck} if self.stuck is not None else set()) | self.silent

    def look(self, facts: Sequence[Facts], now_s: float, is_behind: bool, is_mpirun_stopped: bool = False) -> None:
        """Compare the last answers of the instances with the answers before them.

        Args:
            facts: The facts of each instance, by index.
            now_s: The time on the clock of `time.monotonic`.
            is_behind: Whether instances may be waiting for their output to be read.
            is_mpirun_stopped: Whether a signal has stopped mpirun.
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
                self.silent = find_silent_spares(facts, now_s, limit_s)
                self.halt = find_halt(facts, now_s, limit_s, now_s - self._mpirun_ran_at_s)

    def _find_stuck(self, facts: Sequence[Facts], now_s: float, blind_s: float) -> int | None:
        limit_s = self._stuck_timeout_s
        for find in (find_stopped, find_stuck, find_absent):
            stuck = find(facts, now_s, limit_s)
            if stuck is not None and now_s - facts[stuck].answered_at_s <= blind_s:  # else it may have moved on
                return stuck
        return None

    def forget(self, now_s: float) -> None:
        """Forget the findings so far: the others need time to go on without the lost instances."""
        self.in_vain, self.stuck, self.halt, self.silent = frozenset(), None, None, frozenset()
        self._heeded_s = now_s

    def describe(self, failed: Facts, facts: Sequence[Facts]) -> str:
        """Describe a lost instance without which the others go on."""
        if failed.index == self.stuck:
            return judge_stuck(facts, failed.index, self._stuck_timeout_s).lines[0]
        if failed.index in self.silent:
            return f"{failed.name} was lost: {_describe_silence(self._stuck_timeout_s)}"
        return describe_failure(failed, facts)

    def are_orphaned(self, facts: Sequence[Facts]) -> bool:
        """Return whether an agent on mpirun's host has noticed the end of mpirun."""
        return any(each.host == self._here and each.orphaned_at_s > 0 for each in facts)

    def judge(self, facts: Sequence[Facts], mpirun_status: int | None) -> Verdict:
        """Return the verdict on a job that has failed."""
        if self.stuck is not None:
            return judge_stuck(facts, self.stuck, self._stuck_timeout_s)
        return self.halt or judge(facts, self._here, self.in_vain) or judge_missing(facts, mpirun_status)


BUSY_FACTOR = 10
"""The factor of the limit before `popdist.init` for an instance that uses CPU time: it imports, or prepares data."""

LEAST_S = 10.0
"""The least limit for a silent agent, and for an idle program before `popdist.init`; a busy machine delays both."""


def find_stopped(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """Return the instance that a signal stopped at least `limit_s` ago, or None; it cannot go on by itself."""
    stopped = [each for each in _running(facts) if each.stopped_since_s and now_s - each.stopped_since_s >= limit_s]
    return min(stopped, key=lambda each: each.stopped_since_s).index if stopped else None


def find_absent(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """Return the instance for which others have waited in `popdist.init` for `limit_s`, or None.

    An instance that uses CPU time meanwhile gets `BUSY_FACTOR` times as long.
    """
    limit_s = max(limit_s, LEAST_S)
    waited_s = _longest_wait_s(facts, now_s)
    absent = [each for each in _running(facts) if _has_not_come(each)]
    if waited_s < BUSY_FACTOR * limit_s:
        absent = [each for each in absent if waited_s >= limit_s and now_s - each.busy_at_s >= limit_s]
    return min(absent, key=lambda each: each.busy_at_s).index if absent else None


def find_silent_spares(facts: Sequence[Facts], now_s: float, limit_s: float) -> frozenset[int]:
    """Return the sleeping spares whose agents have not answered for `limit_s` seconds, at least `LEAST_S`."""
    limit_s = max(limit_s, LEAST_S)
    asleep = [each for each in _running(facts) if each.is_asleep]
    return frozenset(each.index for each in asleep if now_s - each.answered_at_s >= limit_s)


def find_halt(facts: Sequence[Facts], now_s: float, limit_s: float, mpirun_stopped_s: float) -> Verdict | None:
    """Return the verdict on a job that has halted through no fault of an instance's program, or None.

    Args:
        facts: The facts of each instance, by index.
        now_s: The time.
        limit_s: The seconds without progress after which the job has halted.
        mpirun_stopped_s: The seconds since a signal stopped mpirun; 0 if it runs.
    """
    if mpirun_stopped_s >= limit_s:
        return _judge(f"mpirun was stopped by a signal or a debugger for {_limit(limit_s)}")
    limit_s = max(limit_s, LEAST_S)
    for each in _running(facts):
        if now_s - each.answered_at_s >= limit_s and not each.is_asleep:
            fact = f"{each.name} was lost: {_describe_silence(limit_s)}"
            return _judge(f"{fact}; that process, or its host, is stopped", each)
    joining = [each.index for each in facts if each.record.is_joining and each.ending is None]
    has_joined_all = len(joining) == len(_running(facts)) == len(facts)
    if has_joined_all and _longest_wait_s(facts, now_s, all_of_them=True) >= limit_s:
        return _judge(
            f"{list_instances(joining)} {'has' if len(joining) == 1 else 'have'} waited for {_limit(limit_s)} in "
            "popdist.init for Open MPI to connect them: one of its processes is stopped, or the hosts cannot reach "
            "each other; `poprun doctor` tests whether they can"
        )
    return None


def _judge(line: str, blamed: Facts | None = None) -> Verdict:
    index = None if blamed is None else blamed.index
    lost = () if blamed is None else (blamed.index,)
    return Verdict(index, STUCK_STATUS, (line,), is_of_hosts=True, is_unexplained=blamed is None, lost=lost)


def _describe_silence(limit_s: float) -> str:
    return f"its supervisor process has not answered for {_limit(limit_s)}"


def _limit(limit_s: float) -> str:
    return f"{limit_s:g} s (--stuck-timeout-s)"


def _running(facts: Sequence[Facts]) -> list[Facts]:
    return [each for each in facts if each.is_started and each.ending is None and not each.is_given_up]


def _has_not_come(each: Facts) -> bool:
    return each.record.state in (State.UNUSED, State.RUNNING) and not each.record.since_s


def _longest_wait_s(facts: Sequence[Facts], now_s: float, all_of_them: bool = False) -> float:
    """Return how long the first instance, or all instances, have waited in `popdist.init`; 0 if none waits."""
    since_s = [each.record.since_s for each in _running(facts) if each.record.is_joining]
    return now_s - (max if all_of_them else min)(since_s, default=now_s)
