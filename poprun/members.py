"""The instances of a running job: their connections, their messages turned into facts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from popdist.environments.progress import parse_progress
from poprun import wire
from poprun.control import Member
from poprun.facts import Ending, EndKind, Facts
from poprun.standard_input import Source

ShowOutput = Callable[[int, int, bytes], None]


class Members:
    """Keeps the facts of every instance up to date.

    Args:
        count: how many instances there are.
        show: called with instance, descriptor and data for every piece of output.
        source: told when instance 0 is ready for input.
    """

    def __init__(self, count: int, show: ShowOutput, source: Source) -> None:
        self.facts = [Facts(index) for index in range(count)]
        self.looks = [0] * count
        self._show = show
        self._source = source
        self._closed: set[int] = set()
        self._connections: dict[int, Member] = {}

    @property
    def all_connected(self) -> bool:
        """Whether every instance has started."""
        return all(each.is_started for each in self.facts)

    @property
    def all_succeeded(self) -> bool:
        """Whether every instance has reported exit status 0."""
        return all(each.ending is not None and each.ending.is_success for each in self.facts)

    @property
    def all_ended(self) -> bool:
        """Whether the end of every instance is known."""
        return all(each.ending is not None for each in self.facts)

    @property
    def all_closed(self) -> bool:
        """Whether nothing is left of any instance that has started."""
        return all(each.index in self._closed or not each.is_started for each in self.facts)

    def take(self, member: Member) -> None:
        """Take in what a shim has sent."""
        for kind, content in member.receive():
            self._take_message(member, kind, content)
        if not member.is_open and member.index >= 0:
            self._note_loss(member.index)

    def tell(self, message: bytes) -> None:
        """Send a message to every shim."""
        for member in self._connections.values():
            member.send(message)

    def tell_one(self, index: int, message: bytes) -> None:
        """Send a message to the shim of one instance."""
        if index in self._connections:
            self._connections[index].send(message)

    def ask(self) -> None:
        """Ask the instances that run for their progress."""
        for index, member in self._connections.items():
            if self.facts[index].ending is None:
                member.send(wire.pack(wire.REPORT))

    def _take_message(self, member: Member, kind: int, content: bytes) -> None:
        index = member.index
        if kind == wire.HELLO:
            index, pid, host = wire.unpack_hello(content)
            member.index = index
            self._connections[index] = member
            self._update(index, pid=pid, host=host)
        elif kind == wire.STDOUT:
            self._show(index, 1, content)
        elif kind == wire.STDERR:
            self._show(index, 2, content)
        elif kind == wire.PROGRESS:
            self._update(index, record=parse_progress(wire.unpack_progress(content)[1]))
            self.looks[index] += 1
        elif kind == wire.ENDED:
            self._note_end(index, content)
        elif kind == wire.WANT:
            self._source.want()
        elif kind == wire.CLOSED:
            self._closed.add(index)

    def _note_end(self, index: int, content: bytes) -> None:
        by_signal, told, number, at_s = wire.unpack_ended(content)
        kind = EndKind.SIGNAL if by_signal else EndKind.EXIT
        self._update(index, ending=Ending(kind, number, at_s, told))

    def _note_loss(self, index: int) -> None:
        self._connections.pop(index, None)
        self._closed.add(index)
        if self.facts[index].ending is None:
            self._update(index, ending=Ending(EndKind.LOST, 0, time.monotonic()))

    def _update(self, index: int, **changes: object) -> None:
        self.facts[index] = replace(self.facts[index], **changes)  # type: ignore[arg-type]
