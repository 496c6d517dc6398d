"""Changes of the active instances on purpose: requests in, wishes for the instances and answers out. Pure.

A wish goes to all processes twice: when all of them have it, it becomes complete, and the chief interrupts the training
at the next step boundary (`popdist.records.wanted`). When all processes have considered it, the asker gets the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from popdist.records.progress import Role
from popdist.records.wanted import Wanted, number_after
from poprun.cli.log import Level
from poprun.cli.wording import count
from poprun.ipc.facts import Facts
from poprun.ipc.resizes import ResizeAnswer, ResizeRequest
from poprun.supervisor.job_events import Action, AgentOrder, Answer, Command, ResizeAsked, Say
from poprun.supervisor.members import JobMembers
from poprun.supervisor.survival import choose_carriers

NOBODY = 0
"""The asker of changes that poprun itself wants; connections have higher numbers."""


@dataclass(frozen=True)
class ResizeWish:
    """A wish about the active instances.

    Attributes:
        count: The number of active instances.
        barred: The indices of the processes that must not be active.
    """

    count: int
    barred: frozenset[int]


class Resizing:
    """The change that is under way, and the hosts that were left.

    Args:
        members: All processes of the job.
        least: The least number of active instances; 0 if the job keeps nothing with which others could join.
        most: The largest useful number of active instances, which is that of the replicas; 0 if unknown.

    Attributes:
        is_under_way: Whether the processes have not all considered the latest wish.
        wanted: The number of active instances that the user has asked for; 0 before.
    """

    def __init__(self, members: JobMembers, least: int, most: int = 0) -> None:
        self.is_under_way = False
        self.wanted = 0
        self._members = members
        self._least = least
        self._most = most
        self._number = 0
        self._stages: list[ResizeWish] = []
        self._wish = ResizeWish(0, frozenset())
        self._told: set[int] = set()
        self._called: set[int] = set()
        self._left_hosts: frozenset[str] = frozenset()
        self._is_complete = False
        self._asked: ResizeAsked | None = None
        self._before = 0

    def ask(self, asked: ResizeAsked) -> list[Action]:
        """Begin the change that a user wants, in place of one that is under way; or answer why it is impossible."""
        obstacle, actions = self._consider(asked)
        return [_refuse(asked, obstacle)] if obstacle else actions

    def is_left(self, host: str) -> bool:
        """Return whether a host is to carry no active instance."""
        return host in self._left_hosts

    def leave(self, host: str) -> tuple[str, list[Action]]:
        """Begin to leave a host for which poprun itself got a notice; return the obstacle, or "", and the actions."""
        return self._consider(ResizeAsked(NOBODY, ResizeRequest(leave=(host,))))

    def _consider(self, asked: ResizeAsked) -> tuple[str, list[Action]]:
        """Begin a change; return the obstacle, or "", and the actions."""
        there = self._there()
        if obstacle := self._obstacle_of_job(there) or _unknown_hosts(asked, there):
            return obstacle, []
        left_hosts = _hosts_after(asked, self._left_hosts, there)
        free = [each for each in there if each.host not in left_hosts and (each.can_join or not each.is_spare)]
        active = [each for each in there if each.record.role is Role.ACTIVE]
        coming = [self._wish, *self._stages][-1].count if self.is_under_way else len(active)
        wanted = asked.request.count or min(coming, len(free))
        if obstacle := self._obstacle(wanted, there, free):
            return obstacle, []
        self._left_hosts, self._before, self.wanted = left_hosts, len(active), wanted
        barred = frozenset(each.index for each in there if each.host in left_hosts)
        if not self.is_under_way and wanted == len(active) and not any(each.index in barred for each in active):
            return "", self._bar_spares(asked, ResizeWish(wanted, barred))
        refusals = [] if self._asked is None else [_refuse(self._asked, "another resize has taken its place")]
        self._asked, self._stages = asked, stages(wanted, active, barred, self._most)
        return "", [*refusals, *self._begin()]

    def _bar_spares(self, asked: ResizeAsked, wish: ResizeWish) -> list[Action]:
        """Tell a wish that the active instances fulfil already; it only says which spares may join later."""
        self._number = number_after(self._number)
        self._wish = wish
        text = f"{wish.count} -> {count(wish.count, 'instance')}: nothing to change"
        return [*self._tell(self._there()), Answer(asked.asker, ResizeAnswer(True, text))]

    def want(self, wanted: int) -> list[Action]:
        """Begin a change that poprun itself wants."""
        there = self._there()
        self._before = sum(each.record.role is Role.ACTIVE for each in there)
        self._stages = [ResizeWish(wanted, frozenset(each.index for each in there if each.host in self._left_hosts))]
        return self._begin()

    def look(self) -> list[Action]:
        """Continue the change as far as the processes' progress records allow."""
        if not self._number:
            return []
        if self._is_complete and self.is_under_way and (calls := self._call()):
            return calls
        there = self._there()
        if untold := [each for each in there if each.index not in self._told]:  # connected, or joined, after the others
            return self._tell(untold)
        if not there or not self.is_under_way:
            return []
        if not self._is_complete:
            self._is_complete = all(each.record.wanted.number == self._number for each in there)
            if not self._is_complete:
                return []
            self._members.expect(choose_carriers(self._members.carriers, there, self._wish.count))
            return self._tell(there)
        if any(each.record.considered != self._number for each in there):
            return []
        if self._stages:
            return self._begin()
        self.is_under_way = False
        return self._conclude(there)

    def _call(self) -> list[Action]:
        """Call the processes that wait at their end to a change that others have begun; those would wait for ever."""
        here = [each for each in self._members.facts if each.ending is None and not each.is_given_up]
        if not any(each.record.is_changing for each in here):
            return []
        called = [
            each.index
            for each in here
            if each.record.is_leaving and not each.record.is_changing and each.record.considered != self._number
        ]
        calls = [AgentOrder(Command.CALL, index, self._number) for index in called if index not in self._called]
        self._called.update(called)
        return list(calls)

    def _there(self) -> list[Facts]:
        """Return the processes that take part in a change: all that are connected, and have not finished."""
        return [
            each
            for each in self._members.facts
            if each.ending is None
            and not each.is_given_up
            and not each.record.is_leaving
            and each.record.role is not Role.UNKNOWN
        ]

    def _begin(self) -> list[Action]:
        self.is_under_way, self._is_complete = True, False
        self._number = number_after(self._number)
        self._called.clear()
        self._wish = self._stages.pop(0)
        return self._tell(self._there())

    def _tell(self, some: Sequence[Facts]) -> list[Action]:
        """Tell the wish to some processes. Without a change under way it is not complete, so it only bars them."""
        self._told |= {each.index for each in some}
        is_complete = self._is_complete and self.is_under_way
        words = {
            each.index: Wanted(self._number, self._wish.count, self._is_barred(each), is_complete) for each in some
        }
        return [AgentOrder(Command.WANT_ACTIVE, index, wanted.pack()) for index, wanted in words.items()]

    def _is_barred(self, each: Facts) -> bool:
        return each.index in self._wish.barred or (each.host in self._left_hosts and each.record.is_spare)

    def _conclude(self, there: Sequence[Facts]) -> list[Action]:
        asked, self._asked = self._asked, None
        wish = self._wish
        active = [each.index for each in there if each.record.role is Role.ACTIVE]
        is_done = len(active) == wish.count and not wish.barred.intersection(active)
        text = f"{self._before} -> {count(len(active), 'instance')}"
        if not is_done:
            text += f", not {wish.count} as wanted: processes were lost meanwhile"
        said: list[Action] = [Say(Level.INFO, f"the job was resized: {text}")]
        return said if asked is None else [*said, Answer(asked.asker, ResizeAnswer(is_done, text))]

    def _obstacle_of_job(self, there: Sequence[Facts]) -> str:
        if not self._least:
            return "the job cannot be resized, because it was not started with --spares"
        if not any(each.record.role in (Role.ACTIVE, Role.FIXED) for each in there):
            return (
                "the job cannot be resized now, because its instances have not connected in popdist.init yet, or have "
                "finished; try again after the first step"
            )
        if any(each.record.role is Role.FIXED for each in there):
            return "the job cannot be resized: its program needs all instances, as a warning at its begin says"
        return ""

    def _obstacle(self, wanted: int, there: Sequence[Facts], free: Sequence[Facts]) -> str:
        if wanted < self._least:
            return f"{count(wanted, 'instance')} would be active, and --min-instances is {self._least}"
        if self._most and wanted > self._most:
            return f"{wanted} instances cannot share {count(self._most, 'replica')}; ask for at most {self._most}"
        if wanted > len(free):
            barred = len(there) - len(free)
            left = f", and {barred} of them on hosts that are left" if barred else ""
            return (
                f"{wanted} instances are wanted, but the job has {_describe(there)}{left}; ask for at most "
                f"{len(free)}, or start the job with more --spares"
            )
        return ""


def stages(wanted: int, active: Sequence[Facts], barred: Collection[int], most: int = 0) -> list[ResizeWish]:
    """Return the wishes that lead to the wanted instances.

    Only an active instance can give the variables to those that join. If all active instances are barred, one of them
    stays until others have joined, and leaves in a second change.

    Args:
        wanted: The wanted number of active instances.
        active: The active instances.
        barred: The indices of the processes that must not be active in the end.
        most: The largest possible number of active instances; 0 if unknown.
    """
    last = ResizeWish(wanted, frozenset(barred))
    if any(each.index not in barred for each in active):
        return [last]
    return [ResizeWish(min(wanted + 1, most or wanted + 1), last.barred - {active[0].index}), last]


def _hosts_after(asked: ResizeAsked, left: frozenset[str], there: Sequence[Facts]) -> frozenset[str]:
    """Return the hosts to be left after a request."""
    leave = {each.host for each in there if _is_named(each.host, asked.request.leave)}
    use = {host for host in left if _is_named(host, asked.request.use)}
    return (left - use) | leave


def _unknown_hosts(asked: ResizeAsked, there: Sequence[Facts]) -> str:
    hosts = sorted({each.host for each in there})
    for name in (*asked.request.leave, *asked.request.use):
        if not any(_is_named(host, (name,)) for host in hosts):
            return f"no instance of the job is on host {name}; its hosts are {', '.join(hosts)}"
    return ""


def _is_named(host: str, names: Sequence[str]) -> bool:
    return host in names or host.partition(".")[0] in names


def _describe(there: Sequence[Facts]) -> str:
    spares = sum(each.record.is_spare for each in there)
    return f"{count(len(there) - spares, 'active instance')} and {count(spares, 'spare')}"


def _refuse(asked: ResizeAsked, reason: str) -> Answer:
    return Answer(asked.asker, ResizeAnswer(False, reason))
