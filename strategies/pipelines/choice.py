"""Which schedule is the fastest for these stages, within a limit of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from strategies.errors import FailedPreconditionError
from strategies.pipelines.mapping import checked_count
from strategies.pipelines.pictures.panel import unit_of
from strategies.pipelines.schedules.registry import PipelineSchedule, schedule_named
from strategies.pipelines.times import StageTimes
from strategies.pipelines.timetable import Kind, Places, Timetable

DIGITS = 6
"""Lengths that agree in so many digits are equal: then less memory counts."""

MIB = 2**20
SIZES = (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10))


@dataclass(frozen=True)
class StashBytes:
    """What a stage keeps of one micro-batch until its backward pass, on each of its devices; in bytes.

    Attributes:
        stashed: for each stage all that the backward pass needs, besides variables.
        inputs: for each stage what goes into it, of which the rest is recomputed.
    """

    stashed: tuple[int, ...]
    inputs: tuple[int, ...]

    def greatest(self, timetable: Timetable, recompute: bool) -> tuple[int, ...]:
        """For each device the greatest number of bytes that it keeps at once.

        With recomputation that is the inputs, and all of the micro-batches whose backward pass runs, or has had one of
        its parts and waits for the other.
        """
        if not timetable.training:
            return (0,) * len(timetable.devices)
        kept = self.inputs if recompute else self.stashed
        return tuple(
            max(self._kept(timetable, device, kept, recompute), default=0) for device in range(len(timetable.devices))
        )

    def _kept(self, timetable: Timetable, device: int, kept: Sequence[int], recompute: bool) -> Iterator[int]:
        """What a device keeps during each of its actions."""
        total = 0
        for kind, stage in ((action.kind, action.stage) for action in timetable.devices[device]):
            again = self.stashed[stage] if recompute else 0
            total += kept[stage] if kind is Kind.FORWARD else 0
            total += again if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUTS) else 0
            yield total
            total -= kept[stage] + again if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS) else 0


@dataclass(frozen=True)
class Candidate:
    """A way to run a pipeline.

    Attributes:
        schedule: its name.
        recompute: whether backward passes recompute.
        length_s: how long an update takes, in seconds, as simulated.
        kept_bytes: for each device what it keeps at most for backward passes.
    """

    schedule: str
    recompute: bool
    length_s: float
    kept_bytes: tuple[int, ...]

    @cached_property
    def most_bytes(self) -> int:
        """Of the device that keeps the most."""
        return max(self.kept_bytes)

    def __str__(self) -> str:
        return self.schedule + (" with recomputation" if self.recompute else "")

    @property
    def said_length(self) -> str:
        """How long it takes, with a unit."""
        return unit_of(self.length_s, True).said(self.length_s)


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and why.

    Attributes:
        chosen: the candidate.
        others: all others, the best first, whether they fit or not.
        reason: one sentence.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    reason: str


def choose(
    times: StageTimes, stash: StashBytes, mapping: Places, num_micro_batches: int, memory_limit_bytes: int | None = None
) -> Choice:
    """The schedule, with or without recomputation, whose simulated update is the shortest of those that fit.

    Of equally long ones it is the one that keeps less; then the one without recomputation; then the first of
    `PipelineSchedule`. A pure function: the instances of a job choose the same if they call it with the same arguments,
    so callers must agree on times and bytes before, on those of instance 0.

    Args:
        times: of the stages, in seconds, without recomputation.
        stash: what the stages keep.
        mapping: for each stage its devices.
        num_micro_batches: of an update; schedules that do not take this number are left out.
        memory_limit_bytes: what a device may keep for backward passes, besides variables and all that is always there;
            None for no limit.

    Raises:
        ValueError: if nothing fits, or there are not times and bytes of all stages.
    """
    if {times.num_stages, len(stash.stashed), len(stash.inputs)} != {len(mapping)}:
        raise ValueError(
            f"there are {len(mapping)} stages, times of {times.num_stages}, and bytes of {len(stash.stashed)} and "
            f"{len(stash.inputs)}; give all of each stage"
        )
    every = sorted(_candidates(times, stash, mapping, num_micro_batches), key=_order)
    fitting = [one for one in every if memory_limit_bytes is None or one.most_bytes <= memory_limit_bytes]
    if not fitting:
        least = min(every, key=lambda one: one.most_bytes)
        raise ValueError(
            f"no pipeline schedule keeps at most {_said(memory_limit_bytes or 0)} on a device: {least} keeps "
            f"the least, {_said(least.most_bytes)}; allow as much, make micro-batches smaller, or cut the model "
            "into more stages"
        )
    others = tuple(one for one in every if one is not fitting[0])
    return Choice(fitting[0], others, _reason(fitting[0], every, len(fitting), memory_limit_bytes))


def _candidates(times: StageTimes, stash: StashBytes, mapping: Places, count: int) -> Iterator[Candidate]:
    """All that can run, in the order of the enum."""
    for member in PipelineSchedule:
        schedule = schedule_named(member)
        try:
            checked_count(count, schedule, mapping)
            timetable = schedule.timetable(mapping, count, True)
        except (FailedPreconditionError, NotImplementedError):
            continue
        for recompute in (False, True):
            length = timetable.length(times.durations(recompute))
            yield Candidate(schedule.name, recompute, length, stash.greatest(timetable, recompute))


def _order(one: Candidate) -> tuple[float, int, bool]:
    return float(f"{one.length_s:.{DIGITS}g}"), one.most_bytes, one.recompute


def _reason(chosen: Candidate, every: Sequence[Candidate], num_fitting: int, limit: int | None) -> str:
    """A sentence with the numbers that decided."""
    which = f"{len(every)} ways to run it"
    if limit is not None:
        which = f"{num_fitting} of {len(every)} ways to run it that keep at most {_said(limit)} on a device"
    words = (
        f"{chosen} was chosen: {chosen.said_length} for an update is the shortest of {which}, and it keeps "
        f"{_said(chosen.most_bytes)}"
    )
    other = next((one for one in every if one.schedule != chosen.schedule), None)
    if other is None:
        return words
    keeps = f"keep {_said(other.most_bytes)}"
    if limit is not None and other.most_bytes > limit:
        return f"{words}; {other} would take {other.said_length}, but {keeps}"
    return f"{words}; {other} would take {other.said_length} and {keeps}"


def _said(number: int) -> str:
    """A number of bytes with a unit."""
    name, size = next((unit for unit in SIZES if number >= unit[1]), ("bytes", 1))
    return f"{number / size:.4g} {name}"
