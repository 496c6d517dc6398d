"""Jobs that lost instances and carried on: judged is the time in which the same ones made most steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from popdist.timeline.events import EventKind
from poprun.trace.recordings import Recording


def with_first_numbers(recordings: Sequence[Recording]) -> list[Recording]:
    """The same, with the numbers that instances had at first for those that are waited for, also after a loss.

    Args:
        recordings: of one job.
    """
    of_attempt = {each.attempt: [other for other in recordings if other.attempt == each.attempt] for each in recordings}
    return [_with_first_numbers(each, of_attempt[each.attempt]) for each in recordings]


def of_longest_membership(recordings: Sequence[Recording]) -> tuple[list[Recording], list[str]]:
    """What was recorded by the last attempt while the same instances made most steps, and what to say of the rest.

    Args:
        recordings: of one job.
    """
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


def _renumbered(recording: Recording) -> np.ndarray:
    """The places of the events that say so."""
    return np.flatnonzero(recording.events["kind"] == EventKind.RENUMBERED)


def _bounds(recording: Recording, period: int) -> slice:
    """The events between two losses: the first period is before any."""
    places = [0, *_renumbered(recording).tolist(), len(recording.events)]
    return slice(places[period] + (period > 0), places[period + 1])


def _steps_in(recording: Recording, period: int) -> int:
    return int(np.count_nonzero(recording.events["kind"][_bounds(recording, period)] == EventKind.STEP_BEGINS))


def _with_first_numbers(recording: Recording, others: Sequence[Recording]) -> Recording:
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


def _number_in(recording: Recording, period: int) -> int:
    """Which number it had after so many losses."""
    return int(recording.events["value"][_renumbered(recording)[period - 1]]) >> 32
