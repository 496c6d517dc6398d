"""From a folder of recordings to a job that can be drawn or judged, also one that lost instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from popdist.timeline.events import EventKind
from poprun.trace.aligned import Aligned, align, doubts
from poprun.trace.profiles import Profiled, read_profile
from poprun.trace.recordings import InstanceRecording, read_recordings, what_is_missing
from poprun.trace.spans import MatchedCollectives, Spans, match, spans_of
from poprun.trace.trace_events import Counts, write_trace


@dataclass(frozen=True, eq=False)
class RecordedJob:
    """The actions of a job's instances, on one clock.

    Attributes:
        aligned: the recordings, by attempt and instance.
        spans: of each of them.
        meetings: the collectives that they have in common.
        warnings: what is missing, or not to be trusted.
    """

    aligned: Sequence[Aligned]
    spans: Sequence[Spans]
    meetings: MatchedCollectives
    warnings: Sequence[str]


def put_together(recordings: Sequence[InstanceRecording], whole: Sequence[InstanceRecording] = ()) -> RecordedJob:
    """Put the recordings of one job together, on the clock of instance 0.

    Args:
        recordings: what is to be seen.
        whole: all there are, if these are not.
    """
    recordings = with_first_numbers(recordings)
    aligned = align(recordings)
    spans = [spans_of(each.recording) for each in aligned]
    meetings = match([each.recording for each in aligned], spans)
    exchanges = (meetings.left_ns - meetings.moved_ns)[meetings.took_part]
    shortest = float(np.median(exchanges)) if len(exchanges) else 0.0
    return RecordedJob(aligned, spans, meetings, [*what_is_missing(whole or recordings), *doubts(aligned, shortest)])


def to_be_judged(recordings: Sequence[InstanceRecording]) -> RecordedJob:
    """Choose the part that a report compares: of the last attempt the longest time with the same instances."""
    chosen, said = of_longest_membership(with_first_numbers(recordings))
    job = put_together(chosen, recordings)
    return replace(job, warnings=[*said, *job.warnings])


def merge(folder: Path, to: Path) -> tuple[RecordedJob, Counts]:
    """Merge the recordings in a folder into one trace.

    Raises:
        PopRunError: there are none.
        OSError: the trace cannot be written.
    """
    job = put_together(read_recordings(folder))
    profiles, said = profiles_of(job.aligned, folder)
    job = replace(job, warnings=[*job.warnings, *said])
    return job, write_trace(to, job.aligned, job.spans, job.meetings, profiles)


def profiles_of(aligned: Sequence[Aligned], folder: Path) -> tuple[list[Profiled | None], list[str]]:
    """Read the profile of each instance; return them, and warnings about those that cannot be read."""
    found: list[Profiled | None] = [None] * len(aligned)
    warnings = []
    for place, each in enumerate(aligned):
        profile = each.recording.profile
        if profile is None:
            continue
        if not profile.file:
            warnings.append(
                f"{each.recording.title}: the profiler of {profile.profiler} had begun, and its profile is lost: it is "
                "written when it ends, which this instance did not live to see; ask for fewer steps"
            )
            continue
        try:
            found[place] = read_profile(folder, profile)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            warnings.append(
                f"{each.recording.title}: its profile is left out, {folder / profile.file}: {why}; if that was written "
                "on another host, copy it there"
            )
    return found, warnings


def with_first_numbers(recordings: Sequence[InstanceRecording]) -> list[InstanceRecording]:
    """Return a job's recordings with waits for the instances' first numbers, also after a loss."""
    of_attempt = {each.attempt: [other for other in recordings if other.attempt == each.attempt] for each in recordings}
    return [_with_first_numbers(each, of_attempt[each.attempt]) for each in recordings]


def of_longest_membership(recordings: Sequence[InstanceRecording]) -> tuple[list[InstanceRecording], list[str]]:
    """Return the events in which the same instances of the last attempt made most steps, and remarks on the rest."""
    attempt = max(each.attempt for each in recordings)
    own = [each for each in recordings if each.attempt == attempt]
    losses = max(len(_renumbered(each)) for each in own)
    if not losses:
        return own, []
    periods = [[each for each in own if len(_renumbered(each)) >= period] for period in range(losses + 1)]
    steps = [max(_steps_in(each, period) for each in there) for period, there in enumerate(periods)]
    best = int(np.argmax(steps))
    chosen = [replace(each, events=each.events[_bounds(each, best)]) for each in periods[best]]
    lost = sorted({each.instance for each in own} - {each.instance for each in periods[-1]})
    said = (
        f"instances {', '.join(map(str, lost))} were lost, and the others carried on; what is told here is of the "
        f"{steps[best]} of {sum(steps)} steps that instances {', '.join(str(each.instance) for each in chosen)} began "
        "together"
    )
    return chosen, [said]


def _renumbered(recording: InstanceRecording) -> np.ndarray:
    """Return the places of the events that renumber instances."""
    return np.flatnonzero(recording.events["kind"] == EventKind.RENUMBERED)


def _bounds(recording: InstanceRecording, period: int) -> slice:
    """Return the range of the events between two losses: the first period is before any."""
    places = [0, *_renumbered(recording).tolist(), len(recording.events)]
    return slice(places[period] + (period > 0), places[period + 1])


def _steps_in(recording: InstanceRecording, period: int) -> int:
    return int(np.count_nonzero(recording.events["kind"][_bounds(recording, period)] == EventKind.STEP_BEGINS))


def _with_first_numbers(recording: InstanceRecording, others: Sequence[InstanceRecording]) -> InstanceRecording:
    losses = len(_renumbered(recording))
    if not losses:
        return recording
    events = recording.events.copy()
    for period in range(1, losses + 1):
        first = {_number_in(each, period): each.instance for each in others if len(_renumbered(each)) >= period}
        own = events[_bounds(recording, period)]
        waits = own["kind"] == EventKind.WAITS_FOR
        own["value"][waits] = [first.get(value, -1) for value in own["value"][waits].tolist()]
    return replace(recording, events=events)


def _number_in(recording: InstanceRecording, period: int) -> int:
    """Return the number of an instance after so many losses."""
    return int(recording.events["value"][_renumbered(recording)[period - 1]]) >> 32
