"""The instances of a running job: their connections, their messages turned into facts."""

from __future__ import annotations

import time
from collections import Counter
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
        self._show = show
        self._source = source
        self._closed: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._connections: dict[int, Member] = {}

    @property
    def all_connected(self) -> bool:
        """Whether every instance has started."""
        return all(each.is_started for each in self.facts)

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
    def are_asked(self) -> bool:
        """Whether an instance that runs has not answered yet how far it is."""
        return any(self._asked[index] > 0 and self.facts[index].ending is None for index in self._connections)

    def take(self, member: Member) -> None:
        """Take in what a shim has sent."""
        for kind, content in member.receive():
            if kind == wire.HELLO:
                self._meet(member, content)
            elif member.index >= 0:
                self._take_message(member, kind, content)
            else:
                member.is_open = False  # a stranger
            if not member.is_open:
                break
        if not member.is_open and member.index >= 0:
            self._note_loss(member)

    def tell(self, message: bytes) -> None:
        """Send a message to every shim."""
        for member in self._connections.values():
            member.send(message)

    def tell_one(self, index: int, message: bytes) -> None:
        """Send a message to the shim of one instance."""
        if index in self._connections:
            self._connections[index].send(message)

    def give_up(self, index: int) -> None:
        """Let the others go on without an instance; nothing of it is to be left."""
        self._update(index, is_given_up=True)
        self.tell_one(index, wire.pack(wire.STOP))

    def ask(self) -> None:
        """Ask the instances that run for their progress."""
        for index, member in self._connections.items():
            if self.facts[index].ending is None:
                self._asked[index] += 1
                member.send(wire.pack(wire.REPORT))

    def _take_message(self, member: Member, kind: int, content: bytes) -> None:
        index = member.index
        if kind == wire.STDOUT:
            self._show(index, 1, content)
        elif kind == wire.STDERR:
            self._show(index, 2, content)
        elif kind == wire.PROGRESS:
            self._note_progress(member, content)
        elif kind == wire.ENDED:
            self._note_end(member, content)
        elif kind == wire.EXAMINED:
            self._update(index, state=content[:1].decode(), stack=content[1:].decode(errors="replace"))
        elif kind == wire.TOLD:
            self._note_told(index, wire.unpack_number(content) == wire.ORPHANED)
        elif kind == wire.WANT:
            self._source.want()
        elif kind == wire.CLOSED:
            self._closed.add(index)

    def _meet(self, member: Member, content: bytes) -> None:
        known = member.meet(content, len(self.facts))
        if known is not None:
            self._connections[member.index] = member
            self._update(member.index, pid=known[0], host=known[1])

    def _note_progress(self, member: Member, content: bytes) -> None:
        self._asked[member.index] -= 1
        record = parse_progress(wire.unpack_progress(content)[1])
        if record.since_s:
            record = replace(record, since_s=record.since_s + member.lag_s)
        self._update(member.index, record=record)

    def _note_told(self, index: int, is_orphaned: bool) -> None:
        now_s = time.monotonic()
        self._update(index, told_at_s=now_s, orphaned_at_s=now_s if is_orphaned else 0.0)

    def _note_end(self, member: Member, content: bytes) -> None:
        by_signal, told, lacked_memory, number, at_s = wire.unpack_ended(content)
        kind = EndKind.SIGNAL if by_signal else EndKind.EXIT
        ending = Ending(kind, number, at_s + member.lag_s, told, lacked_memory=lacked_memory)
        self._update(member.index, ending=ending)

    def _note_loss(self, member: Member) -> None:
        index = member.index
        self._connections.pop(index, None)
        self._closed.add(index)
        if self.facts[index].ending is None:
            self._update(index, ending=Ending(EndKind.LOST, 0, time.monotonic(), fault=member.fault))

    def _update(self, index: int, **changes: object) -> None:
        self.facts[index] = replace(self.facts[index], **changes)  # type: ignore[arg-type]
