"""The instances of a running job: events turned into facts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from popdist.records.progress import Role
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.supervisor.job_events import (
    AgentOrder,
    Command,
    InstanceChange,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    MemberEvent,
    ProgressCame,
)

MOST_QUESTIONS = 8
"""The largest number of unanswered questions to one agent. A stopped agent reads none, and more could block poprun."""


class JobMembers:
    """The current facts of every instance and spare, and the agents that are connected.

    Args:
        count: The number of instances and spares.
        spares: The number of spares, which have the highest indices.
        reserves: The number of spares that are reserves, which have the highest indices of these.

    Attributes:
        target: The number of active instances after a change: that of the last complete wish, or of the start.
    """

    def __init__(self, count: int, spares: int = 0, reserves: int = 0) -> None:
        self.facts = [
            Facts(index, is_spare=index >= count - spares, is_reserve=index >= count - reserves)
            for index in range(count)
        ]
        self._carriers = self._next_carriers = tuple(range(count - spares))
        self.target = count - spares
        self._closed: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._connected: dict[int, None] = {}  # in the order of their connections

    @property
    def all_connected(self) -> bool:
        """Whether every instance has started."""
        return all(each.is_started for each in self.facts)

    @property
    def any_connected(self) -> bool:
        """Whether an agent is still connected."""
        return bool(self._connected)

    @property
    def all_succeeded(self) -> bool:
        """Whether every instance that is needed has reported exit status 0."""
        return all(each.ending is not None and each.ending.is_success for each in self.facts if each.is_needed)

    @property
    def all_ended(self) -> bool:
        """Whether every instance has ended; sleeping spares do not count."""
        return all(each.ending is not None for each in self.facts if not each.is_asleep)

    @property
    def all_closed(self) -> bool:
        """Whether all processes of every started instance are gone; sleeping spares do not count."""
        return all(each.index in self._closed or not each.is_started or each.is_asleep for each in self.facts)

    @property
    def are_spares_closed(self) -> bool:
        """Whether all processes of the sleeping spares are gone."""
        return all(each.index in self._closed or not each.is_asleep for each in self.facts)

    @property
    def carriers(self) -> tuple[int, ...]:
        """The instances that drive the replicas, in their order."""
        named = [self.facts[index] for index in self._carriers]
        return tuple(each.index for each in named if not each.is_given_up and not each.is_spare)

    @property
    def left(self) -> list[Facts]:
        """The started instances that may still have processes."""
        return [each for each in self.facts if each.is_started and each.index not in self._closed]

    @property
    def are_others_closed(self) -> bool:
        """Whether all processes of every instance are gone that was not given up; sleeping spares do not count."""
        return all(each.index in self._closed or not each.is_needed for each in self.facts)

    @property
    def are_asked(self) -> bool:
        """Whether a running instance has not answered the last question yet."""
        return any(self._asked[index] > 0 and self.facts[index].ending is None for index in self._connected)

    def take(self, event: MemberEvent, now_s: float) -> None:
        """Update the facts of an instance from an event."""
        index = event.instance
        match event:
            case ProgressCame():
                self._asked[index] -= 1
                self._note_progress(event, now_s)
            case MemberConnected(pid=pid, host=host):
                self._connected[index] = None
                self._update(index, pid=pid, host=host, answered_at_s=now_s, busy_at_s=now_s)
            case InstanceEnded(ending=ending):
                self._update(index, ending=ending)
            case InstanceChanged():
                self._take_change(index, event, now_s)

    def _take_change(self, index: int, event: InstanceChanged, now_s: float) -> None:
        match event.change:
            case InstanceChange.TOLD:
                self._update(index, told_at_s=now_s)
            case InstanceChange.ORPHANED:
                self._update(index, told_at_s=now_s, orphaned_at_s=now_s)
            case InstanceChange.EXAMINED:
                self._update(index, state=event.text[:1], stack=event.text[1:])
            case InstanceChange.CLOSED:
                self._closed.add(index)
            case InstanceChange.LOST:
                self._note_loss(index, event.text, now_s)

    def ask(self) -> list[AgentOrder]:
        """Ask the running instances for their progress, except those with too many unanswered questions."""
        running = [index for index in self._connected if self.facts[index].ending is None]
        asked = [index for index in running if self._asked[index] < MOST_QUESTIONS]
        self._asked.update(asked)
        return [AgentOrder(Command.ASK, index) for index in asked]

    def stop(self) -> list[AgentOrder]:
        """Order all agents to end the remaining processes of their instances."""
        return [AgentOrder(Command.STOP, index) for index in self._connected]

    def pass_on(self, number: int) -> list[AgentOrder]:
        """Send a signal to the programs of all instances.

        Sleeping spares do not get it: the instances tell them what follows, and a signal might end them before.
        """
        awake = [index for index in self._connected if not self.facts[index].is_asleep]
        return [AgentOrder(Command.PASS_ON, index, number) for index in awake]

    def release(self, index: int, lost: int) -> list[AgentOrder]:
        """Tell an instance that `lost` instances are lost; return no order if its agent is not connected."""
        return [AgentOrder(Command.RELEASE, index, lost)] if index in self._connected else []

    def give_up(self, index: int) -> list[AgentOrder]:
        """Mark an instance as given up, and order its agent to end all of its processes."""
        self._update(index, is_given_up=True)
        return [AgentOrder(Command.STOP, index)] if index in self._connected else []

    def go_on_with(self, carriers: Sequence[int]) -> None:
        """Note which instances are to drive the replicas, in their order; spares among them join."""
        self._carriers = self._next_carriers = tuple(carriers)
        for index in carriers:
            self._update(index, is_spare=False)

    def expect(self, carriers: Sequence[int]) -> None:
        """Note which instances will drive the replicas, in their order, as soon as one reports another role."""
        self._next_carriers = tuple(carriers)

    def note_told_alone(self, before_s: float) -> None:
        """Mark as lost every instance that was stopped alone; mpirun stops all of them together.

        Args:
            before_s: A time long enough ago. If an agent was told to stop before it, and another one has not been told
                until now, the first one was told alone.
        """
        if all(each.told_at_s or each.ending is not None for each in self.facts):
            return
        for each in self.facts:
            ending = each.ending
            if ending is not None and ending.told and not ending.is_success and 0 < each.told_at_s <= before_s:
                self._update(each.index, ending=Ending(EndKind.LOST, 0, ending.at_s))

    def _note_progress(self, event: ProgressCame, now_s: float) -> None:
        before = self.facts[event.instance]
        self._update(
            event.instance,
            record=event.record,
            answered_at_s=now_s,
            stopped_since_s=(before.stopped_since_s or now_s) if event.is_stopped else 0.0,
            effort=event.effort,
            memory_bytes=event.memory_bytes,
            peak_memory_bytes=event.peak_memory_bytes,
            busy_at_s=now_s if event.effort != before.effort else before.busy_at_s,
        )
        if event.record.wanted.is_complete and event.record.role is Role.ACTIVE and not event.record.is_leaving:
            self.target = event.record.wanted.count  # popdist keeps it too, until another wish is complete
        if event.record.role not in (before.record.role, Role.UNKNOWN):
            self._note_role(event.instance, event.record.is_spare)

    def _note_role(self, index: int, is_spare: bool) -> None:
        """Note a role that an instance reports. If a spare joins uncalled, those called in vain are spares again."""
        if self.facts[index].is_spare and not is_spare:
            for each in self.facts:
                if each.record.is_spare and each.ending is None and not each.is_given_up:
                    self._update(each.index, is_spare=True)
        self._update(index, is_spare=is_spare)
        if not is_spare and index not in self._next_carriers:
            self._next_carriers += (index,)
        self._carriers = self._next_carriers

    def _note_loss(self, index: int, fault: str, now_s: float) -> None:
        self._connected.pop(index, None)
        self._closed.add(index)
        if self.facts[index].ending is None:
            was_told = self.facts[index].told_at_s > 0  # mpirun then does not wait for the other instances
            self._update(index, ending=Ending(EndKind.LOST, 0, now_s, was_told, fault))

    def _update(self, index: int, **changes: object) -> None:
        self.facts[index] = replace(self.facts[index], **changes)  # type: ignore[arg-type]
