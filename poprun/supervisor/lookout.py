"""Detection of stuck instances, of jobs at a standstill, and of losses that a job survives. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from popdist.records.progress import State
from poprun.cli.log import Level
from poprun.cli.wording import count
from poprun.ipc.facts import Ending, Facts, Verdict
from poprun.supervisor.diagnosis import (
    STUCK_STATUS,
    Wait,
    describe_failure,
    find_stuck,
    is_of_hosts,
    judge,
    judge_missing,
    judge_stuck,
    list_instances,
    vain_waits,
)
from poprun.supervisor.job_events import Action, Say
from poprun.supervisor.members import JobMembers

BLIND_S = 5.0
"""The pause between two looks, as of a stopped poprun, after which nobody is stuck at once; at most half the limit."""


class Lookout:
    """The comparison of each look at the instances with the looks before it.

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
        """Forget the instances that were found: the others need time to go on without them."""
        self.in_vain, self.stuck, self.halt = frozenset(), None, None
        self._heeded_s = now_s

    def describe(self, failed: Facts, facts: Sequence[Facts]) -> str:
        """Describe an instance without which the others go on."""
        if failed.index == self.stuck:
            return judge_stuck(facts, failed.index, self._stuck_timeout_s).lines[0]
        return describe_failure(failed, facts)

    def judge(self, facts: Sequence[Facts], mpirun_status: int | None) -> Verdict:
        """Return the verdict on a job that has failed."""
        if self.stuck is not None:
            return judge_stuck(facts, self.stuck, self._stuck_timeout_s)
        return self.halt or judge(facts, self._here, self.in_vain) or judge_missing(facts, mpirun_status)


BUSY_FACTOR = 10
"""The factor of the limit by which a working instance may be late at `popdist.init`: it imports, or prepares data."""

LEAST_S = 10.0
"""An agent that has not answered for less, and a program that has done nothing, may wait for a busy machine."""


def find_stopped(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """Return the instance that a signal stopped `limit_s` ago, or None. It will not go on by itself."""
    stopped = [each for each in _running(facts) if each.stopped_since_s and now_s - each.stopped_since_s >= limit_s]
    return min(stopped, key=lambda each: each.stopped_since_s).index if stopped else None


def find_absent(facts: Sequence[Facts], now_s: float, limit_s: float) -> int | None:
    """Return the instance for which others have waited in `popdist.init` for `limit_s`, or None.

    One that is asleep or waits for something uses no CPU time meanwhile; one that does may be late.
    """
    limit_s = max(limit_s, LEAST_S)
    waited_s = _longest_wait_s(facts, now_s)
    absent = [each for each in _running(facts) if _has_not_come(each)]
    if waited_s < BUSY_FACTOR * limit_s:
        absent = [each for each in absent if waited_s >= limit_s and now_s - each.busy_at_s >= limit_s]
    return min(absent, key=lambda each: each.busy_at_s).index if absent else None


def find_halt(facts: Sequence[Facts], now_s: float, limit_s: float, mpirun_stopped_s: float) -> Verdict | None:
    """Return the verdict on a job that has halted though no instance's program is to blame, or None.

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
    """Return how long the first one, or all of them, have waited in `popdist.init`; 0 if none waits."""
    since_s = [each.record.since_s for each in _running(facts) if each.record.is_joining]
    return now_s - (max if all_of_them else min)(since_s, default=now_s)


class Survival:
    """The instances without which a job goes on, where the user allows that.

    Args:
        members: all of them.
        least: with how many the job goes on; 0: with all only.

    Attributes:
        losses: a line about each that was given up.
        obstacle: why the others could not go on, where the user wants it; "" as long as they could.
    """

    def __init__(self, members: JobMembers, least: int) -> None:
        self.losses: list[str] = []
        self.obstacle = ""
        self._members = members
        self._least = least

    def give_up(
        self, useless: Collection[int], was_told: Callable[[Ending], bool], describe: Callable[[Facts], str]
    ) -> list[Action]:
        """Give up those that have failed, and tell the others, who wait for them in vain.

        Args:
            useless: others that do not help any more: they are stuck, or left too early.
            was_told: whether it is because of a signal from the user that an instance has come to such an end.
            describe: says what has become of an instance.

        Returns:
            What the agents are told, and a line about each; nothing if none has failed, or the others cannot go on.
        """
        here = [each for each in self._members.facts if not each.is_given_up]
        failed = [
            each for each in here if each.index in useless or (each.ending is not None and each.ending.is_own_failure)
        ]
        left = [each for each in here if each not in failed and each.ending is None]
        were_told = any(each.ending is not None and was_told(each.ending) for each in failed)
        if not failed or were_told or is_of_hosts(failed) or not self._least:
            return []
        if obstacle := self._obstacle(left):
            self.obstacle = self.obstacle or obstacle  # later ones fail because of the first
            return []
        others = list_instances([each.index for each in left])
        follows = f"{others} {'goes' if len(left) == 1 else 'go'} on without it"
        losses = [describe(each) for each in failed]
        self.losses += losses
        actions: list[Action] = []
        for each in failed:
            actions += self._members.give_up(each.index)
        for each in left:
            actions += self._members.release(each.index, len(self.losses))
        return [*actions, *(Say(Level.WARN, f"{line}; {follows}") for line in losses)]

    def _obstacle(self, left: Collection[Facts]) -> str:
        if not self._members.all_connected or not all(each.record.has_joined for each in left):
            return "the others cannot go on: what is lost before popdist.init has returned everywhere ends the job"
        if len(left) < max(1, self._least):
            return f"{count(len(left), 'instance')} would be left, --min-instances is {self._least}: the job ends"
        return ""
