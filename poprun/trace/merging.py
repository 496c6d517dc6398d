"""From a folder of recordings to what can be drawn or judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from poprun.trace.aligned import Aligned, align, doubts
from poprun.trace.matching import Meetings, match
from poprun.trace.memberships import of_longest_membership, with_first_numbers
from poprun.trace.profiles import Profiled, read_profile
from poprun.trace.recordings import Recording, read_recordings, what_is_missing
from poprun.trace.spans import Spans, spans_of
from poprun.trace.trace_events import Counts, write_trace


@dataclass(frozen=True, eq=False)
class Job:
    """What the instances of a job did, on one clock.

    Attributes:
        aligned: the recordings, by attempt and instance.
        spans: of each of them.
        meetings: the collectives that they have in common.
        warnings: what is missing, or not to be trusted.
    """

    aligned: Sequence[Aligned]
    spans: Sequence[Spans]
    meetings: Meetings
    warnings: Sequence[str]


def put_together(recordings: Sequence[Recording], whole: Sequence[Recording] = ()) -> Job:
    """The recordings of one job, on the clock of instance 0.

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
    return Job(aligned, spans, meetings, [*what_is_missing(whole or recordings), *doubts(aligned, shortest)])


def to_be_judged(recordings: Sequence[Recording]) -> Job:
    """What a report compares: the last attempt, and of that the time in which the same instances made most steps."""
    chosen, said = of_longest_membership(with_first_numbers(recordings))
    job = put_together(chosen, recordings)
    return replace(job, warnings=[*said, *job.warnings])


def merge(folder: Path, to: Path) -> tuple[Job, Counts]:
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
    """What profilers saw of each instance, and whose profile is not to be had."""
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
