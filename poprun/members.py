"""The instances of a running job: what was told about them turned into facts. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from poprun.facts import Ending, EndKind, Facts
from poprun.job_actions import Ask, PassOn, Release, Stop
from poprun.job_events import (
    InstanceClosed,
    InstanceEnded,
    InstanceExamined,
    InstanceTold,
    MemberConnected,
    MemberEvent,
    MemberLost,
    ProgressCame,
)


class Members:
    """Keeps the facts of every instance up to date; knows whom one can talk to.

    Args:
        count: how many instances there are.
    """

    def __init__(self, count: int) -> None:
        self.facts = [Facts(index) for index in range(count)]
        self._closed: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._connected: dict[int, None] = {}  # in the order in which they came

    @property
    def all_connected(self) -> bool:
        """Whether every instance has started."""
        return all(each.is_started for each in self.facts)

    @property
    def any_connected(self) -> bool:
        """Whether there is a shim that may still say something."""
        return bool(self._connected)

    @property
    def all_succeeded(self) -> bool:
        """Whether every instance has reported exit status 0."""
        return all(each.is_given_up or (each.ending is not None and each.ending.is_success) for each in self.facts)

    @property
    def all_ended(self) -> bool:
        """Whether the end of every instance is known."""
        return all(each.ending is not None for each in self.facts)

    @property
    def all_closed(self) -> bool:
        """Whether nothing is left of any instance that has started."""
        return all(each.index in self._closed or not each.is_started for each in self.facts)

    @property
    def are_others_closed(self) -> bool:
        """Whether nothing is left of any instance that was not given up."""
        return all(each.index in self._closed or each.is_given_up for each in self.facts)

    @property
    def are_asked(self) -> bool:
        """Whether an instance that runs has not answered yet how far it is."""
        return any(self._asked[index] > 0 and self.facts[index].ending is None for index in self._connected)

    def take(self, event: MemberEvent, now_s: float) -> None:
        """Take note of what has happened to an instance."""
        index = event.instance
        match event:
            case ProgressCame(record=record):
                self._asked[index] -= 1
                self._update(index, record=record)
            case MemberConnected(pid=pid, host=host):
                self._connected[index] = None
                self._update(index, pid=pid, host=host)
            case InstanceEnded(ending=ending):
                self._update(index, ending=ending)
            case InstanceTold(is_orphaned=is_orphaned):
                self._update(index, told_at_s=now_s, orphaned_at_s=now_s if is_orphaned else 0.0)
            case InstanceExamined(state=state, stack=stack):
                self._update(index, state=state, stack=stack)
            case InstanceClosed():
                self._closed.add(index)
            case MemberLost(fault=fault):
                self._note_loss(index, fault, now_s)

    def ask(self) -> list[Ask]:
        """Ask the instances that run for their progress."""
        asked = [index for index in self._connected if self.facts[index].ending is None]
        self._asked.update(asked)
        return [Ask(index) for index in asked]

    def stop(self) -> list[Stop]:
        """End what is left of all."""
        return [Stop(index) for index in self._connected]

    def pass_on(self, number: int) -> list[PassOn]:
        """Send a signal to the programs of all."""
        return [PassOn(index, number) for index in self._connected]

    def release(self, index: int, lost: int) -> list[Release]:
        """Tell one that so many are lost; nothing where nobody would hear it."""
        return [Release(index, lost)] if index in self._connected else []

    def give_up(self, index: int) -> list[Stop]:
        """Let the others go on without an instance; nothing of it is to be left."""
        self._update(index, is_given_up=True)
        return [Stop(index)] if index in self._connected else []

    def _note_loss(self, index: int, fault: str, now_s: float) -> None:
        self._connected.pop(index, None)
        self._closed.add(index)
        if self.facts[index].ending is None:
            self._update(index, ending=Ending(EndKind.LOST, 0, now_s, fault=fault))

    def _update(self, index: int, **changes: object) -> None:
        self.facts[index] = replace(self.facts[index], **changes)  # type: ignore[arg-type]
