"""The translation of agents' messages into events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from popdist.records.progress import ProgressRecord, parse_progress
from poprun.ipc import wire
from poprun.ipc.facts import Ending, EndKind
from poprun.supervisor.job_events import (
    InstanceChange,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    MemberEvent,
    OutputPiece,
    ProgressCame,
)
from poprun.supervisor.reception import Member


@dataclass(frozen=True)
class InputWanted:
    """A request of instance 0 for a piece of standard input; the machine of the job does not see it."""


Report = MemberEvent | OutputPiece | InputWanted


def read_reports(member: Member, count: int) -> Iterator[Report]:
    """Read an agent's messages and yield them as events; disconnect a caller that does not identify itself.

    Args:
        member: Our end of a connection with data to read; `is_open` is false afterwards if the connection has ended.
        count: The number of instances of the job.
    """
    for kind, content in member.receive():
        if kind == wire.HELLO:
            if (known := member.meet(content, count)) is not None:
                yield MemberConnected(member.index, *known)
        elif member.index < 0:
            member.is_open = False  # a stranger
        elif (report := _read(member, kind, content)) is not None:
            yield report
        if not member.is_open:
            break
    if not member.is_open and member.index >= 0:
        yield InstanceChanged(member.index, InstanceChange.LOST, member.fault)


def _read(member: Member, kind: int, content: bytes) -> Report | None:
    index = member.index
    if kind in (wire.STDOUT, wire.STDERR):
        return OutputPiece(index, 1 if kind == wire.STDOUT else 2, content)
    if kind == wire.PROGRESS:
        return _read_progress(member, content)
    if kind == wire.ENDED:
        return _read_end(member, content)
    if kind == wire.EXAMINED:
        return InstanceChanged(index, InstanceChange.EXAMINED, content.decode(errors="replace"))
    if kind == wire.TOLD:
        is_orphaned = wire.unpack_number(content) == wire.ORPHANED
        return InstanceChanged(index, InstanceChange.ORPHANED if is_orphaned else InstanceChange.TOLD)
    if kind == wire.NOTICED:
        return InstanceChanged(index, InstanceChange.NOTICED)
    if kind == wire.WANT:
        return InputWanted()
    return InstanceChanged(index, InstanceChange.CLOSED) if kind == wire.CLOSED else None


def _read_progress(member: Member, content: bytes) -> ProgressCame:
    _, page, is_stopped, effort, memory = wire.unpack_progress(content)
    record = _on_our_clock(parse_progress(page), member.lag_s)
    return ProgressCame(member.index, record, is_stopped, effort, *memory)


def _on_our_clock(record: ProgressRecord, lag_s: float) -> ProgressRecord:
    """Return the record with times on our clock."""
    if record.made.from_s:
        made = replace(record.made, from_s=record.made.from_s + lag_s, to_s=record.made.to_s + lag_s)
        record = replace(record, made=made)
    return replace(record, since_s=record.since_s + lag_s) if record.since_s else record


def _read_end(member: Member, content: bytes) -> InstanceEnded:
    by_signal, told, lacked_memory, number, at_s = wire.unpack_ended(content)
    kind = EndKind.SIGNAL if by_signal else EndKind.EXIT
    return InstanceEnded(member.index, Ending(kind, number, at_s + member.lag_s, told, lacked_memory=lacked_memory))
