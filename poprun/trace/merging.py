"""The steps from a folder of recordings to a job that can be drawn or judged, even if it has lost instances."""

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
    """The recordings of a job's instances on one clock, with their spans and common collectives.

    Attributes:
        aligned: The recordings, sorted by attempt and instance.
        spans: The spans of each recording.
        meetings: The collectives of several instances.
        warnings: Warnings about missing or untrustworthy data.
    """

    aligned: Sequence[Aligned]
    spans: Sequence[Spans]
    meetings: MatchedCollectives
    warnings: Sequence[str]


def put_together(recordings: Sequence[InstanceRecording], whole: Sequence[InstanceRecording] = ()) -> RecordedJob:
    """Put the recordings of one job on the clock of instance 0.

    Args:
        recordings: The recordings to evaluate.
        whole: All recordings of the job, if `recordings` is a part of them.
    """
    recordings = with_first_numbers(recordings)
    aligned = align(recordings)
    spans = [spans_of(each.recording) for each in aligned]
    meetings = match([each.recording for each in aligned], spans)
    exchanges = (meetings.left_ns - meetings.moved_ns)[meetings.took_part]
    shortest = float(np.median(exchanges)) if len(exchanges) else 0.0
    return RecordedJob(aligned, spans, meetings, [*what_is_missing(whole or recordings), *doubts(aligned, shortest)])


def to_be_judged(recordings: Sequence[InstanceRecording]) -> RecordedJob:
    """Return the part of a job that a report covers: the last attempt's period with most steps and no loss."""
    chosen, said = of_longest_membership(with_first_numbers(recordings))
    job = put_together(chosen, recordings)
    return replace(job, warnings=[*said, *job.warnings])


def merge(folder: Path, to: Path) -> tuple[RecordedJob, Counts]:
    """Merge the recordings in a folder into one trace.

    Raises:
        PopRunError: If there are no recordings.
        OSError: If the trace cannot be written.
    """
    job = put_together(read_recordings(folder))
    profiles, said = profiles_of(job.aligned, folder)
    job = replace(job, warnings=[*job.warnings, *said])
    return job, write_trace(to, job.aligned, job.spans, job.meetings, profiles)


def profiles_of(aligned: Sequence[Aligned], folder: Path) -> tuple[list[Profiled | None], list[str]]:
    """Read the profile of each instance; return the profiles, and warnings about lost or unreadable ones."""
    found: list[Profiled | None] = [None] * len(aligned)
    warnings = []
    for place, each in enumerate(aligned):
        profile = each.recording.profile
        if profile is None:
            continue
        if not profile.file:
            warnings.append(
                f"{each.recording.title}: the profiler of {profile.profiler} had begun, and its profile is lost: the "
                "instance ended before the profiler wrote it; profile fewer steps"
            )
            continue
        try:
            found[place] = read_profile(folder, profile)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            warnings.append(
                f"{each.recording.title}: its profile is left out, {folder / profile.file}: {why}; if the file was "
                "written on another host, copy it there"
            )
    return found, warnings


def with_first_numbers(recordings: Sequence[InstanceRecording]) -> list[InstanceRecording]:
    """Return the recordings; their events name instances by their numbers before any loss."""
    of_attempt = {each.attempt: [other for other in recordings if other.attempt == each.attempt] for each in recordings}
    return [_with_first_numbers(each, of_attempt[each.attempt]) for each in recordings]


def of_longest_membership(recordings: Sequence[InstanceRecording]) -> tuple[list[InstanceRecording], list[str]]:
    """Return the last attempt's period with most steps and no loss, and remarks on the other periods."""
    attempt = max(each.attempt for each in recordings)
    own = [each for each in recordings if each.attempt == attempt]
    losses = max(len(_renumbered(each)) for each in own)
    if not losses:
        return [each for each in own if not each.is_spare], []
    periods = [[each for each in own if len(_renumbered(each)) >= period] for period in range(losses + 1)]
    steps = [max(_steps_in(each, period) for each in there) for period, there in enumerate(periods)]
    best = int(np.argmax(steps))
    chosen = [
        replace(each, events=each.events[_bounds(each, best)]) for each in periods[best] if not _is_asleep(each, best)
    ]
    lost = sorted({each.instance for each in own} - {each.instance for each in periods[-1]})
    gone = f"{_listed(lost)} {'was' if len(lost) == 1 else 'were'} lost"
    began = f"{_listed([each.instance for each in chosen])} began{' together' if len(chosen) > 1 else ''}"
    said = f"{gone}, and the others carried on; this report covers the {steps[best]} of {sum(steps)} steps that {began}"
    return chosen, [said]


def _listed(instances: Sequence[int]) -> str:
    if not instances:
        return "some instances"
    return f"{'instance' if len(instances) == 1 else 'instances'} {', '.join(map(str, instances))}"


def _renumbered(recording: InstanceRecording) -> np.ndarray:
    """Return the positions of the events that renumber instances."""
    return np.flatnonzero(recording.events["kind"] == EventKind.RENUMBERED)


def _is_asleep(recording: InstanceRecording, period: int) -> bool:
    """Return whether an instance was a spare in a period."""
    return recording.is_spare if period == 0 else int(recording.events["value"][_renumbered(recording)[period - 1]]) < 0


def _bounds(recording: InstanceRecording, period: int) -> slice:
    """Return the range of the events of a period; period 0 is before the first loss, period 1 after it, and so on."""
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
    """Return the number that an instance has in a period after the first loss."""
    return int(recording.events["value"][_renumbered(recording)[period - 1]]) >> 32
