"""The recordings of a job on one clock, the clock of instance 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from popdist.timeline.clocks import Alignment
from poprun.trace.recordings import InstanceRecording

_WALL_NS = 1e9
"""The assumed uncertainty of wall clocks, which are seldom set to better than a second."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """A recording whose events have the times of instance 0.

    Attributes:
        recording: The recording, with the times of its events on the clock of instance 0.
        uncertainty_ns: The largest error of these times; 0 if the recording was made with instance 0's clock.
        is_measured: Whether the hosts have compared their clocks; if not, their wall clocks were used.
        ahead_ns: The mean lead of instance 0's clock over the recording's clock.
        drift: The relative difference in speed of the two clocks; positive if instance 0's clock is faster.
        drift_uncertainty: The largest error of `drift`.
        alignment: The measured relation of both clocks; unknown if they differ by `ahead_ns` all the time.
    """

    recording: InstanceRecording
    uncertainty_ns: float = 0.0
    is_measured: bool = True
    ahead_ns: float = 0.0
    drift: float = 0.0
    drift_uncertainty: float = 0.0
    alignment: Alignment = Alignment()

    def at_home(self, times_ns: np.ndarray) -> np.ndarray:
        """Return times on the recording's own clock as times on the clock of instance 0."""
        if not self.alignment.is_known:
            return times_ns + round(self.ahead_ns)
        moved: np.ndarray = times_ns + np.rint(self.alignment.at(times_ns).middle_ns).astype(np.int64)
        return moved


def align(recordings: Sequence[InstanceRecording]) -> list[Aligned]:
    """Bring a job's recordings to the clock of instance 0 in the first attempt, even if its recording is missing."""
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
    """Return the recording on the clock `home`; None if the relation of the clocks is unknown."""
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
    """Align a recording by the wall clocks at its beginning."""
    other = reference.recording
    ahead = (recording.began_at_s - other.began_at_s) * 1e9 - (recording.began_ns - other.began_ns)
    ahead += reference.ahead_ns
    events = recording.events.copy()
    events["when_ns"] += round(ahead)
    return Aligned(replace(recording, events=events), _WALL_NS, False, ahead)


def doubts(aligned: Sequence[Aligned], shortest_ns: float) -> list[str]:
    """Return warnings about clocks less certain than `shortest_ns`, the median duration of an exchange."""
    warnings = []
    for each in aligned:
        if not each.is_measured:
            warnings.append(
                f"{each.recording.title}: its host has not compared its clock with that of instance 0; its times "
                "come from its wall clock, and may be wrong by any amount; allow UDP between the hosts"
            )
        elif each.uncertainty_ns > shortest_ns:
            warnings.append(
                f"{each.recording.title}: its clock is known to {each.uncertainty_ns / 1e3:.0f} us only, but half of "
                f"the exchanges took less than {shortest_ns / 1e3:.0f} us; do not trust their order between hosts"
            )
    return warnings
