"""The state of a job at one moment, as poprun sends it to viewers. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from popdist.instance import replica_blocks
from popdist.records.progress import Made, State
from poprun.ipc import json_values
from poprun.ipc.facts import Facts
from poprun.monitor.attempts import waiting_share

VERSION = 1
"""The version of the format; it grows if a field changes its meaning or is removed."""

ENDED, LOST, STARTING, STOPPED = "ended", "lost", "starting", "stopped"
JOINING, RUNNING, WAITING, LEAVING, SPARE, RESERVE = "joining", "running", "waiting", "leaving", "spare", "reserve"
CONDITIONS = (ENDED, LOST, STARTING, STOPPED, JOINING, RUNNING, WAITING, LEAVING, SPARE, RESERVE)

_CONDITIONS = {
    State.JOINING: JOINING,
    State.LEAVING: LEAVING,
    State.LEAVING_INSIDE: LEAVING,
    State.FINISHED: LEAVING,
}
_WORDS = {
    STARTING: "not there yet",
    LOST: "the others go on without it",
    STOPPED: "stopped by a signal",
    JOINING: "popdist.init",
    LEAVING: "at its end",
    SPARE: "ready to take over",
    RESERVE: "not needed yet, or on its way",
}


@dataclass(frozen=True)
class Seen:
    """The state of one instance.

    Attributes:
        instance: The index of the instance.
        host: Its host; "" before it has started.
        pid: The pid of its program; 0 before it has started.
        condition: One of `CONDITIONS`; waiting means a wait for others that is longer than a moment, and spare a
            spare that is ready to take the place of a lost instance.
        doing: The phase of its step, its current collective, or its end.
        for_s: The seconds for which it has been doing this; None if unknown.
        step: The training step, from 0; None before the first step.
        steps_per_s: The current rate of steps; None if unknown.
        samples_per_s: The current rate of samples; None if unknown.
        waiting_share: The share of its steps' time in which it has waited for others; None if unknown.
        waiting_for: The instances for which it waits, if the wait is long.
        loss: The mean loss over all replicas in a recent step; None if unknown or not finite.
        memory_bytes: Its current memory; 0 if unknown.
        peak_memory_bytes: Its largest memory so far; 0 if unknown.
        replicas: The first and the last of its replicas; empty if it drives none, or if the job has no spares and has
            lost no instance.
    """

    instance: int
    host: str = ""
    pid: int = 0
    condition: str = STARTING
    doing: str = ""
    for_s: float | None = None
    step: int | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    waiting_share: float | None = None
    waiting_for: tuple[int, ...] = ()
    loss: float | None = None
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The state of a job at one moment.

    Attributes:
        pid: The pid of poprun.
        host: The host of poprun.
        program: The words of the program.
        age_s: The seconds since the begin of the job, including earlier attempts.
        attempt: The number of restarts.
        losses: The number of lost instances without which the job goes on.
        instances: All instances by index; empty in a pause between two attempts.
        replaced: The number of lost instances whose place a spare has taken.
    """

    pid: int
    host: str
    program: tuple[str, ...]
    age_s: float
    attempt: int = 0
    losses: int = 0
    instances: tuple[Seen, ...] = ()
    replaced: int = 0

    @property
    def samples_per_s(self) -> float | None:
        """The rate of all instances together; None if unknown."""
        known = [each.samples_per_s for each in self.instances if each.samples_per_s is not None]
        return sum(known) if known else None

    def pack(self) -> bytes:
        """Return the snapshot as one line of JSON, for viewers and for `poprun top --json`."""
        return json_values.pack(asdict(self), VERSION)

    @classmethod
    def unpack(cls, data: bytes) -> Snapshot:
        """Return the snapshot in JSON that `pack` has made here or in another version of poprun.

        Raises:
            ValueError: If the data are no snapshot, or have another version.
        """
        return json_values.unpack(cls, data, VERSION, "snapshot of poprun")


def look_at(each: Facts, recent: Recent, now_s: float, replicas: tuple[int, ...] = ()) -> Seen:
    """Return the state of an instance at the time `now_s`."""
    record = each.record
    condition = _condition(each)
    rates = recent.rates(each.index, record.made, now_s) if each.ending is None else None
    is_known = record.state is not State.UNUSED
    return Seen(
        instance=each.index,
        host=each.host,
        pid=each.pid,
        condition=condition,
        doing=_doing(each, condition),
        for_s=max(now_s - record.since_s, 0.0) if record.since_s and each.ending is None else None,
        step=record.step if is_known and (record.step or record.made.steps) else None,
        steps_per_s=None if rates is None else rates[0],
        samples_per_s=None if rates is None else rates[1],
        waiting_share=waiting_share(record.made),
        waiting_for=record.waiting_for if each.ending is None else (),
        loss=record.made.loss if record.made.loss is not None and math.isfinite(record.made.loss) else None,
        memory_bytes=each.memory_bytes if each.ending is None else 0,
        peak_memory_bytes=each.peak_memory_bytes,
        replicas=replicas,
    )


def look_at_all(
    facts: Sequence[Facts], recent: Recent, now_s: float, carriers: Sequence[int] = (), replicas: int = 0
) -> tuple[Seen, ...]:
    """Return the states of all instances at the time `now_s`.

    Args:
        facts: The facts of each instance, by index.
        recent: The recent counts of each instance.
        now_s: The time.
        carriers: The instances that drive the replicas, in order; empty if their replicas are not to be shown.
        replicas: The number of replicas.
    """
    blocks = dict(zip(carriers, replica_blocks(len(carriers), replicas) if carriers else (), strict=True))
    ends = {index: (block[0], block[-1]) for index, block in blocks.items() if block}
    return tuple(look_at(each, recent, now_s, ends.get(each.index, ())) for each in facts)


def _condition(each: Facts) -> str:
    if each.ending is not None:
        return ENDED if each.ending.is_success else LOST
    if each.is_given_up:
        return LOST
    if not each.is_started:
        return STARTING
    if each.stopped_since_s:
        return STOPPED
    if each.is_asleep:
        return SPARE if each.can_join else RESERVE
    if each.record.waiting_for:
        return WAITING
    return _CONDITIONS.get(each.record.state, RUNNING)


def _doing(each: Facts, condition: str) -> str:
    record = each.record
    if each.ending is not None:
        return each.ending.describe()
    if condition in _WORDS:
        return _WORDS[condition]
    if record.is_inside and (condition == WAITING or not record.phase):
        return record.label
    if record.phase:
        return record.phase
    return "" if record.state is State.UNUSED else "between steps" if record.made.steps else "before its first step"


APART_S = 1.0
"""The least time between two stored counts."""
_KEPT = 8


class Recent:
    """The recent counts of each instance, and its rates."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Made]] = {}

    def note(self, instance: int, made: Made) -> None:
        """Store the counts of an instance, if enough time has passed since the last stored ones."""
        if not made.steps:
            return
        kept = self._kept.setdefault(instance, deque(maxlen=_KEPT))
        if not kept or made.to_s >= kept[-1].to_s + APART_S:
            kept.append(made)

    def rates(self, instance: int, made: Made, now_s: float) -> tuple[float, float] | None:
        """Return an instance's steps and samples per second; None before two steps.

        The rates fall if the next step takes longer than the steps before.
        """
        kept = self._kept.get(instance)
        if not kept:
            return None
        before = next((each for each in kept if each.steps < made.steps), None) if made.steps > 1 else None
        if before is None:
            return None
        steps = made.steps - before.steps
        elapsed_s = made.to_s - before.to_s
        overdue_s = now_s - made.to_s - elapsed_s / steps
        elapsed_s += max(overdue_s, 0.0)
        return (steps / elapsed_s, (made.samples - before.samples) / elapsed_s) if elapsed_s > 0 else None
