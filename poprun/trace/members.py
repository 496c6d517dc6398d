"""The members of a recorded job over time: which instances drove the replicas, and which were lost or joined. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from popdist.instance import replica_block
from popdist.timeline.events import EventKind
from poprun.cli.wording import list_ranges
from poprun.trace.recordings import InstanceRecording


@dataclass(frozen=True)
class InstancePeriod:
    """The time between two changes of the members, as an instance has recorded it.

    Attributes:
        number: The number of changes before.
        index: The number of the instance among the active ones.
        count: The number of active instances; 0 if this one is a spare.
        events: The range of its events.
    """

    number: int
    index: int
    count: int
    events: slice

    def replicas(self, total: int) -> range:
        """Return the replicas that the instance drives, of `total` replicas; none if it is a spare."""
        return replica_block(self.index, self.count, total) if self.count else range(0)


@dataclass(frozen=True)
class Period:
    """The time between two changes of the members, for all instances of a job.

    Attributes:
        steps: The steps that were completed.
        active: The memberships of the active instances, by the instance's index in the recording.
    """

    steps: Sequence[int]
    active: Mapping[int, InstancePeriod]


def memberships_of(recording: InstanceRecording) -> list[InstancePeriod]:
    """Return the memberships of an instance, from its begin to its end."""
    events = recording.events
    places = np.flatnonzero(events["kind"] == EventKind.RENUMBERED).tolist()
    begins, ends = [0, *(place + 1 for place in places)], [*places, len(events)]
    found = [InstancePeriod(0, recording.instance, 0 if recording.is_spare else recording.instances, slice(0, ends[0]))]
    for occurrence, place in enumerate(places, start=1):
        index, number_of_active = divmod(int(events["value"][place]), 1 << 32)
        number = int(events["track"][place]) or occurrence  # a recording of an earlier version has no number
        found.append(InstancePeriod(number, index, number_of_active, slice(begins[occurrence], ends[occurrence])))
    return found


def periods_of(recordings: Sequence[InstanceRecording]) -> list[Period]:
    """Return the periods of an attempt at a job in which steps were completed."""
    found: dict[int, dict[int, InstancePeriod]] = {}
    steps: dict[int, set[int]] = {}
    for recording in recordings:
        for each in memberships_of(recording):
            if each.count:
                found.setdefault(each.number, {})[recording.instance] = each
                steps.setdefault(each.number, set()).update(_steps_in(recording, each.events))
    return [Period(sorted(steps[number]), found[number]) for number in sorted(found) if steps[number]]


def of_longest_period(recordings: Sequence[InstanceRecording]) -> tuple[list[InstanceRecording], list[str]]:
    """Return the last attempt's period with most steps and no change, and a remark on the changes."""
    attempt = max(each.attempt for each in recordings)
    own = [each for each in recordings if each.attempt == attempt]
    periods = periods_of(own)
    if not has_changes(own) or not periods:
        return [each for each in own if not each.is_spare], []
    best = max(periods, key=lambda each: len(each.steps))
    chosen = [
        replace(each, events=each.events[best.active[each.instance].events])
        for each in own
        if each.instance in best.active
    ]
    made = f"{_listed(chosen)} made{' together' if len(chosen) > 1 else ''}"
    in_all = sum(len(each.steps) for each in periods)
    covers = f"this report covers the {len(best.steps)} of {in_all} steps that {made}"
    return chosen, [f"{_describe_changes(own)}; {covers}"]


def has_changes(recordings: Sequence[InstanceRecording]) -> bool:
    """Return whether the members have changed during a job."""
    return any(len(memberships_of(each)) > 1 for each in recordings)


def with_first_numbers(recordings: Sequence[InstanceRecording]) -> list[InstanceRecording]:
    """Return the recordings; their events name instances by their numbers at the start of the job."""
    firsts: dict[tuple[int, int], dict[int, int]] = {}
    for recording in recordings:
        for each in memberships_of(recording)[1:]:
            if each.count:
                firsts.setdefault((recording.attempt, each.number), {})[each.index] = recording.instance
    return [_with_first_numbers(each, firsts) for each in recordings]


def _with_first_numbers(
    recording: InstanceRecording, firsts: Mapping[tuple[int, int], Mapping[int, int]]
) -> InstanceRecording:
    later = memberships_of(recording)[1:]
    if not later:
        return recording
    events = recording.events.copy()
    for each in later:
        own = events[each.events]
        waits = own["kind"] == EventKind.WAITS_FOR
        first = firsts.get((recording.attempt, each.number), {})
        own["value"][waits] = [first.get(value, -1) for value in own["value"][waits].tolist()]
    return replace(recording, events=events)


def _describe_changes(recordings: Sequence[InstanceRecording]) -> str:
    """Describe which instances were lost, which spares have joined, and which instances became spares."""
    of_each = {each.instance: memberships_of(each) for each in recordings}
    last = max(each.number for own in of_each.values() for each in own)
    lost = [each for each in recordings if of_each[each.instance][-1].number < last and not _sleeps(each)]
    joined = [each for each in recordings if each.is_spare and any(own.count for own in of_each[each.instance])]
    asleep = [each for each in recordings if not each.is_spare and _sleeps(each)]
    said = [
        f"{_listed(lost)} {'was' if len(lost) == 1 else 'were'} lost" if lost else "",
        f"{_listed(joined)} joined" if joined else "",
        f"{_listed(asleep)} became {'a spare' if len(asleep) == 1 else 'spares'}" if asleep else "",
    ]
    if not any(said):
        return "some instances were lost, and the others carried on"
    return ", ".join(filter(None, said)) + (", and the others carried on" if lost and not joined else "")


def _sleeps(recording: InstanceRecording) -> bool:
    """Return whether the recording ends while the instance is a spare."""
    return not memberships_of(recording)[-1].count


def _listed(recordings: Sequence[InstanceRecording]) -> str:
    """List instances, then spares, by their numbers."""
    parts = []
    for noun, own in (
        ("instance", [each for each in recordings if not each.is_spare]),
        ("spare", [each for each in recordings if each.is_spare]),
    ):
        if own:
            parts.append(f"{noun}{'s' * (len(own) > 1)} {', '.join(str(each.instance) for each in own)}")
    return " and ".join(parts)


def _steps_in(recording: InstanceRecording, where: slice) -> list[int]:
    """Return the steps that have ended in a range of events; a change may have interrupted the first one."""
    events = recording.events
    begins = np.flatnonzero(events["kind"] == EventKind.STEP_BEGINS)
    ends = where.start + np.flatnonzero(events["kind"][where] == EventKind.STEP_ENDS)
    last_begins = np.searchsorted(begins, ends) - 1
    steps: list[int] = events["value"][begins[last_begins[last_begins >= 0]]].tolist()
    return steps


def describe_membership(value: int, replicas: int) -> str:
    """Describe the value of an event that renumbers an instance.

    Args:
        value: The value of the event.
        replicas: The number of replicas of all instances; 0 if unknown.
    """
    index, active = divmod(value, 1 << 32)
    if not active:
        return "sleeps as a spare"
    drives = f" with replicas {list_ranges(replica_block(index, active, replicas))}" if replicas else ""
    return f"carries on as instance {index} of {active}{drives}"
