"""The steps from a folder of recordings to a job that can be drawn or judged, even if its members have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from poprun.trace.aligned import Aligned, align, doubts
from poprun.trace.members import Period, has_changes, of_longest_period, periods_of, with_first_numbers
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
        periods: The times between changes of the members; empty if the members have not changed.
    """

    aligned: Sequence[Aligned]
    spans: Sequence[Spans]
    meetings: MatchedCollectives
    warnings: Sequence[str]
    periods: Sequence[Period] = ()


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
    recordings = with_first_numbers(recordings)
    chosen, said = of_longest_period(recordings)
    job = put_together(chosen, recordings)
    last = [each for each in recordings if each.attempt == chosen[0].attempt]
    return replace(job, warnings=[*said, *job.warnings], periods=periods_of(last) if has_changes(last) else ())


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
