"""What stands still besides instances that others wait for in a collective (`diagnosis.find_stuck`). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from popdist.records.progress import State
from poprun.ipc.facts import Facts, Verdict
from poprun.supervisor.diagnosis import STUCK_STATUS, list_instances

BUSY_FACTOR = 10
"""So many times the limit an instance that works may be late at `popdist.init`: it imports, or prepares data."""

LEAST_S = 10.0
"""An agent that has not answered for less, and a program that has done nothing, may wait for a busy machine."""


def find_stopped(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """The instance that a signal stopped `limit_s` ago, or None. It will not go on by itself, whoever waits for it."""
    stopped = [each for each in _running(facts) if each.stopped_since_s and now_s - each.stopped_since_s >= limit_s]
    return min(stopped, key=lambda each: each.stopped_since_s).index if stopped else None


def find_absent(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """The instance that does not come to `popdist.init`, where others have waited for it for `limit_s`; or None.

    One that is asleep or waits for something uses no CPU time meanwhile; one that does may be late.
    """
    limit_s = max(limit_s, LEAST_S)
    waited_s = _longest_wait_s(facts, now_s)
    absent = [each for each in _running(facts) if _has_not_come(each)]
    if waited_s < BUSY_FACTOR * limit_s:
        absent = [each for each in absent if waited_s >= limit_s and now_s - each.busy_at_s >= limit_s]
    return min(absent, key=lambda each: each.busy_at_s).index if absent else None


def find_halt(facts: Sequence[Facts], now_s: float, limit_s: float, mpirun_stopped_s: float) -> Verdict | None:
    """The verdict over a job that no program of an instance has brought to a halt, or None.

    Args:
        facts: one entry for each instance, in order.
        now_s: the time.
        limit_s: for so long nothing has to have happened.
        mpirun_stopped_s: for how long a signal has stopped mpirun.
    """
    if mpirun_stopped_s >= limit_s:
        return _judge(f"mpirun was stopped by a signal or a debugger for {_limit(limit_s)}")
    limit_s = max(limit_s, LEAST_S)
    for each in _running(facts):
        if now_s - each.answered_at_s >= limit_s:
            fact = f"{each.name} was lost: its supervisor process has not answered for {_limit(limit_s)}"
            return _judge(f"{fact}; that process, or its host, is stopped", each)
    joining = [each.index for each in facts if each.record.is_joining and each.ending is None]
    has_joined_all = len(joining) == len(_running(facts)) == len(facts)
    if has_joined_all and _longest_wait_s(facts, now_s, all_of_them=True) >= limit_s:
        return _judge(
            f"{list_instances(joining)} {'has' if len(joining) == 1 else 'have'} waited for {_limit(limit_s)} in "
            "popdist.init for Open MPI to connect them: a process of it is stopped, or hosts do not reach each other; "
            "poprun doctor shows whether they do"
        )
    return None


def _judge(line: str, blamed: Facts | None = None) -> Verdict:
    index = None if blamed is None else blamed.index
    lost = () if blamed is None else (blamed.index,)
    return Verdict(index, STUCK_STATUS, (line,), is_of_hosts=True, is_unexplained=blamed is None, lost=lost)


def _limit(limit_s: float) -> str:
    return f"{limit_s:g} s (--stuck-timeout-s)"


def _running(facts: Sequence[Facts]) -> list[Facts]:
    return [each for each in facts if each.is_started and each.ending is None and not each.is_given_up]


def _has_not_come(each: Facts) -> bool:
    return each.record.state in (State.UNUSED, State.RUNNING) and not each.record.since_s


def _longest_wait_s(facts: Sequence[Facts], now_s: float, all_of_them: bool = False) -> float:
    """For how long the first one, or all of them, have waited in `popdist.init`; 0 where none does."""
    since_s = [each.record.since_s for each in _running(facts) if each.record.is_joining]
    return now_s - (max if all_of_them else min)(since_s, default=now_s)
