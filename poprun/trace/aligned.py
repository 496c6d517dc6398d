"""The recordings of a job on one clock: that of instance 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from popdist.timeline.clocks import Alignment
from poprun.trace.recordings import InstanceRecording

_WALL_NS = 1e9
"""The assumed uncertainty of clocks on walls, which are seldom set better than to a second."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """A recording whose events have the times of instance 0.

    Attributes:
        recording: the events of which are in order of that time, as far as they were.
        uncertainty_ns: the times are wrong by no more than that; 0 for those of instance 0's clock.
        is_measured: whether hosts have compared their clocks; if not, those on their walls had to do.
        ahead_ns: by how much instance 0's clock is ahead, on the average.
        drift: how much faster it runs, in parts of one.
        drift_uncertainty: that is wrong by no more than this.
        alignment: what is known of both clocks; nothing where they differ by `ahead_ns` all the time.
    """

    recording: InstanceRecording
    uncertainty_ns: float = 0.0
    is_measured: bool = True
    ahead_ns: float = 0.0
    drift: float = 0.0
    drift_uncertainty: float = 0.0
    alignment: Alignment = Alignment()

    def at_home(self, times_ns: np.ndarray) -> np.ndarray:
        """Times of the recording's own clock as those of instance 0."""
        if not self.alignment.is_known:
            return times_ns + round(self.ahead_ns)
        moved: np.ndarray = times_ns + np.rint(self.alignment.at(times_ns).middle_ns).astype(np.int64)
        return moved


def align(recordings: Sequence[InstanceRecording]) -> list[Aligned]:
    """Bring a job's recordings to the clock of the first attempt's instance 0, whether or not it is there."""
    first = recordings[0]
    home = first.asked_clock or first.clock
    exchanges: dict[str, list[np.ndarray]] = {}
    for each in recordings:
        if each.asked_clock == home:
            exchanges.setdefault(each.clock, []).append(each.exchanges)
    known = {clock: Alignment.of(np.concatenate(parts)) for clock, parts in exchanges.items()}
    found = [_align(each, home, known.get(each.clock, Alignment())) for each in recordings]
    reference = next((each for each in found if each is not None), Aligned(first))
    return [each or _by_the_wall(own, reference) for each, own in zip(found, recordings, strict=True)]


def _align(recording: InstanceRecording, home: str, alignment: Alignment) -> Aligned | None:
    """None where nothing is known of its clock."""
    if recording.clock == home:
        return Aligned(recording)
    if not alignment.is_known:
        return None
    events = recording.events.copy()
    difference = alignment.at(events["when_ns"])
    events["when_ns"] += np.rint(difference.middle_ns).astype(np.int64)
    drift, drift_uncertainty = alignment.drift
    return Aligned(
        replace(recording, events=events),
        float(difference.uncertainty_ns.max(initial=0.0)) + 1,
        True,
        float(difference.middle_ns.mean()) if len(events) else 0.0,
        drift,
        drift_uncertainty,
        alignment,
    )


def _by_the_wall(recording: InstanceRecording, reference: Aligned) -> Aligned:
    """Align a recording by the clocks on the walls when it began."""
    other = reference.recording
    ahead = (recording.began_at_s - other.began_at_s) * 1e9 - (recording.began_ns - other.began_ns)
    ahead += reference.ahead_ns
    events = recording.events.copy()
    events["when_ns"] += round(ahead)
    return Aligned(replace(recording, events=events), _WALL_NS, False, ahead)


def doubts(aligned: Sequence[Aligned], shortest_ns: float) -> list[str]:
    """Return warnings about clocks that are less certain than `shortest_ns`, the length of what is compared."""
    warnings = []
    for each in aligned:
        if not each.is_measured:
            warnings.append(
                f"{each.recording.title}: its host has not compared its clock with that of instance 0, so its times "
                "are those of the clock on the wall, and may be off by any amount; let UDP pass between the hosts"
            )
        elif each.uncertainty_ns > shortest_ns:
            warnings.append(
                f"{each.recording.title}: its clock is known to {each.uncertainty_ns / 1e3:.0f} us only, half of the "
                f"exchanges took less than {shortest_ns / 1e3:.0f} us; do not trust their order between hosts"
            )
    return warnings
