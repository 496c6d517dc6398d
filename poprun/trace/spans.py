"""Spans: pairs of events of one instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from popdist.timeline.events import EventKind
from poprun.trace.recordings import InstanceRecording


class Sort(IntEnum):
    """Sorts of spans."""

    STEP = 0
    BETWEEN_STEPS = 1
    """As an evaluation."""
    PHASE = 2
    WAIT = 3
    """Of an operation: until all ranks have come."""
    TRANSFER = 4
    """Of an operation: what is left of it."""
    OPERATION = 5
    """All of one in which nobody has seen data move."""
    REPLICA = 6


SPAN = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("step", "<i8"),
        ("value", "<i8"),
        ("name", "<u4"),
        ("track", "<u2"),
        ("sort", "u1"),
        ("failed", "?"),
    ]
)
"""`value`: of a step the rows, of an operation its number, of a replica the part. `name` as in the events."""

COMPILE, DATA = "compile", "data"


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of a recording.

    Attributes:
        spans: an array of `SPAN`, by begin within each sort.
        waits: events of kind `WAITS_FOR`.
        moved: events of kind `DATA_MOVES`.
        measured: for each thing that was measured times (int64) and values (float64).
    """

    spans: np.ndarray
    waits: np.ndarray
    moved: np.ndarray
    measured: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def of(self, *sorts: Sort) -> np.ndarray:
        """Return the spans of these sorts."""
        found: np.ndarray = self.spans[np.isin(self.spans["sort"], sorts)]
        return found


def spans_of(recording: InstanceRecording) -> Spans:
    """Return all spans of a recording; one that was never ended lasts until the next of its kind, or the end."""
    events = recording.events
    steps = _step_of_each(events)
    numbers = {str(said["name"]): number for number, said in recording.names.items() if "call" not in said}
    compiles = events["name"] == numbers.get(COMPILE, -1)
    phases = _among(events, EventKind.PHASE_BEGINS, EventKind.PHASE_ENDS)
    found = [
        _steps(events),
        _pairs(events, steps, phases & ~compiles, EventKind.PHASE_BEGINS, Sort.PHASE),
        _pairs(events, steps, phases & compiles, EventKind.PHASE_BEGINS, Sort.PHASE),
        _operations(events, steps),
        _replicas(events, steps),
    ]
    spans = np.concatenate(found)
    is_data = (spans["sort"] == Sort.PHASE) & (spans["name"] == numbers.get(DATA, -1))
    spans["step"][is_data] += 1  # data are read for the step that comes next
    spans = spans[~(is_data & spans["failed"])]  # no batch was left
    measured = {}
    of_measures = events[events["kind"] == EventKind.MEASURED]
    for number in np.unique(of_measures["name"]).tolist():
        own = of_measures[of_measures["name"] == number]
        values = np.ascontiguousarray(own["value"]).view(np.float64)
        measured[str(recording.names[number]["name"])] = (own["when_ns"], values)
    return Spans(spans, _of_kind(events, EventKind.WAITS_FOR), _of_kind(events, EventKind.DATA_MOVES), measured)


def _of_kind(events: np.ndarray, kind: EventKind) -> np.ndarray:
    found: np.ndarray = events[events["kind"] == kind]
    return found


def _among(events: np.ndarray, *kinds: EventKind) -> np.ndarray:
    found: np.ndarray = np.isin(events["kind"], kinds)
    return found


def _step_of_each(events: np.ndarray) -> np.ndarray:
    """Return the step of each event; -1 before the first."""
    begins = np.flatnonzero(events["kind"] == EventKind.STEP_BEGINS)
    known = np.append(np.int64(-1), events["value"][begins])
    steps: np.ndarray = known[np.searchsorted(begins, np.arange(len(events)), side="right")]
    return steps


def _empty(count: int) -> np.ndarray:
    return np.zeros(count, SPAN)


def _pairs(events: np.ndarray, steps: np.ndarray, chosen: np.ndarray, begin: EventKind, sort: Sort) -> np.ndarray:
    """Return spans from each begin to the end that follows, of the chosen events, if no event between is lost."""
    places = np.flatnonzero(chosen)
    own = events[places]
    gaps = np.cumsum(events["kind"] == EventKind.EVENTS_LOST)[places]
    is_begin = own["kind"] == begin
    following = np.append(places[1:], max(len(events) - 1, 0))[is_begin]
    is_of_same = (own["name"][1:] == own["name"][:-1]) & (gaps[1:] == gaps[:-1])
    is_ended = np.append(~is_begin[1:] & is_of_same, False)[is_begin]
    begins = places[is_begin]
    spans = _empty(len(begins))
    spans["begin_ns"] = events["when_ns"][begins]
    spans["end_ns"] = np.maximum(events["when_ns"][following], spans["begin_ns"])
    spans["step"] = steps[begins]
    spans["name"] = events["name"][begins]
    spans["track"] = events["track"][begins]
    spans["value"] = events["value"][begins]
    spans["sort"] = sort
    spans["failed"] = ~is_ended
    return spans


def _steps(events: np.ndarray) -> np.ndarray:
    chosen = _among(events, EventKind.STEP_BEGINS, EventKind.STEP_ENDS)
    own = events[chosen]
    spans = _pairs(events, np.zeros(len(events), np.int64), chosen, EventKind.STEP_BEGINS, Sort.STEP)
    spans["step"] = spans["value"]
    ends = np.append(own["value"][1:], 0)[own["kind"] == EventKind.STEP_BEGINS]
    spans["value"] = np.where(spans["failed"], 0, ends)
    spans["sort"][spans["failed"]] = Sort.BETWEEN_STEPS
    spans["failed"] = False
    return spans


def _operations(events: np.ndarray, steps: np.ndarray) -> np.ndarray:
    chosen = _among(events, EventKind.OPERATION_BEGINS, EventKind.OPERATION_ENDS)
    ended = events.copy()
    is_end = events["kind"] == EventKind.OPERATION_ENDS  # ends have no name; that of the begin before
    begins = np.flatnonzero(events["kind"] == EventKind.OPERATION_BEGINS)
    if not len(begins):
        return _empty(0)
    last = np.clip(np.searchsorted(begins, np.flatnonzero(is_end), side="right") - 1, 0, None)
    ended["name"][is_end] = events["name"][begins[last]]
    whole = _pairs(ended, steps, chosen, EventKind.OPERATION_BEGINS, Sort.OPERATION)
    moves = np.append(events["when_ns"][events["kind"] == EventKind.DATA_MOVES], np.iinfo(np.int64).max)
    first = moves[np.searchsorted(moves, whole["begin_ns"])]
    has_moved = first <= whole["end_ns"]
    waits, transfers = whole[has_moved].copy(), whole[has_moved].copy()
    waits["sort"], transfers["sort"] = Sort.WAIT, Sort.TRANSFER
    waits["end_ns"] = transfers["begin_ns"] = first[has_moved]
    waits["failed"] = False
    rest = whole[~has_moved]
    rest["sort"][rest["failed"]] = Sort.WAIT  # it failed before all had come
    return np.concatenate([rest, waits, transfers])


def _replicas(events: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return spans from a replica's begin, or the end of a part, to the end of the next part."""
    places = np.flatnonzero(_among(events, EventKind.REPLICA_BEGINS, EventKind.REPLICA_ENDS))
    own = events[places]
    order = np.lexsort((places, own["track"], own["name"]))
    own, places = own[order], places[order]
    follows = (own["name"][1:] == own["name"][:-1]) & (own["track"][1:] == own["track"][:-1])
    is_end = np.append(False, follows & (own["kind"][1:] == EventKind.REPLICA_ENDS))
    ends = np.flatnonzero(is_end)
    spans = _empty(len(ends))
    spans["begin_ns"], spans["end_ns"] = own["when_ns"][ends - 1], own["when_ns"][ends]
    spans["step"] = steps[places[ends]]
    spans["name"], spans["track"], spans["value"] = own["name"][ends], own["track"][ends], own["value"][ends]
    spans["sort"] = Sort.REPLICA
    return spans
