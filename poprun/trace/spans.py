"""Spans, which are pairs of events of one instance, and collectives matched between instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from popdist.timeline.events import EventKind
from poprun.trace.recordings import InstanceRecording

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
"""The dtype of spans. `value` is a step's number of rows, an operation's number, or a replica's part. `name` is the
number of a name, as in events.
"""

COMPILE, DATA = "compile", "data"

_NEVER = np.iinfo(np.int64).max


class Sort(IntEnum):
    """Kinds of spans."""

    STEP = 0
    BETWEEN_STEPS = 1
    """Code between two steps, such as an evaluation."""
    PHASE = 2
    WAIT = 3
    """The first part of an operation, until all ranks have come."""
    TRANSFER = 4
    """The rest of an operation, after all ranks have come."""
    OPERATION = 5
    """A whole operation, if no movement of data was recorded in it."""
    REPLICA = 6


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of a recording.

    Attributes:
        spans: An array of `SPAN`, sorted by begin within each sort.
        waits: The events of kind `WAITS_FOR`.
        moved: The events of kind `DATA_MOVES`.
        measured: The times (int64) and values (float64) of each measured quantity, by name.
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
    """Return all spans of a recording; a span without an end lasts until the next of its kind, or to the last event."""
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
    spans["step"][is_data] += 1  # data are read for the next step
    spans = spans[~(is_data & spans["failed"])]  # reading failed because no batch was left
    measured = {}
    is_measure = events["kind"] == EventKind.MEASURED
    for number in np.unique(events["name"][is_measure]).tolist():
        chosen = is_measure & (events["name"] == number)
        own, name = events[chosen], str(recording.names[number]["name"])
        measured[name] = (own["when_ns"], np.ascontiguousarray(own["value"]).view(np.float64))
    waits, moved = _of_kind(events, EventKind.WAITS_FOR), _of_kind(events, EventKind.DATA_MOVES)
    return Spans(spans, waits, moved, measured)


def _of_kind(events: np.ndarray, kind: EventKind) -> np.ndarray:
    found: np.ndarray = events[events["kind"] == kind]
    return found


def _among(events: np.ndarray, *kinds: EventKind) -> np.ndarray:
    found: np.ndarray = np.isin(events["kind"], kinds)
    return found


def _step_of_each(events: np.ndarray) -> np.ndarray:
    """Return the step of each event; -1 before the first step."""
    begins = np.flatnonzero(events["kind"] == EventKind.STEP_BEGINS)
    known = np.append(np.int64(-1), events["value"][begins])
    steps: np.ndarray = known[np.searchsorted(begins, np.arange(len(events)), side="right")]
    return steps


def _empty(count: int) -> np.ndarray:
    return np.zeros(count, SPAN)


def _pairs(events: np.ndarray, steps: np.ndarray, chosen: np.ndarray, begin: EventKind, sort: Sort) -> np.ndarray:
    """Return spans of the chosen events, from each begin to the following end; mark those without an end as failed.

    A pair with lost events between its begin and its end counts as a span without an end.
    """
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
    is_end = events["kind"] == EventKind.OPERATION_ENDS  # these get the name of the begin before
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
    rest["sort"][rest["failed"]] = Sort.WAIT  # the operation failed before all had come
    return np.concatenate([rest, waits, transfers])


def _replicas(events: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return spans of replicas' parts: each begins with the replica, or with the end of the part before."""
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


@dataclass(frozen=True, eq=False)
class MatchedCollectives:
    """Collectives of several instances. Rows are collectives, columns are instances.

    Attributes:
        step: The step of each collective.
        name: The name of each collective, an index into `names`.
        names: The names of collectives.
        came_ns: The time when each instance came to the collective, int64.
        moved_ns: The time when each instance saw that all others had come.
        left_ns: The time when each instance had its result.
        took_part: Whether each instance took part; if not, its times have no meaning.
    """

    step: np.ndarray
    name: np.ndarray
    names: Sequence[str]
    came_ns: np.ndarray
    moved_ns: np.ndarray
    left_ns: np.ndarray
    took_part: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """The column of the last instance to come to each collective."""
        last: np.ndarray = np.argmax(np.where(self.took_part, self.came_ns, -_NEVER), axis=1)
        return last

    @property
    def late_ns(self) -> np.ndarray:
        """The time between the last two arrivals, for which the last instance alone held all others up."""
        came = np.sort(np.where(self.took_part, self.came_ns, -_NEVER), axis=1)
        late: np.ndarray = came[:, -1] - came[:, -2]
        return late


def match(recordings: Sequence[InstanceRecording], spans: Sequence[Spans]) -> MatchedCollectives:
    """Match the collectives of instances by attempt, step, name, and position among equal names."""
    names = sorted({str(said["name"]) for each in recordings for said in each.names.values() if "call" in said})
    numbers = {name: number for number, name in enumerate(names)}
    parts = [_called(each, own, numbers) for each, own in zip(recordings, spans, strict=True)]
    turns = 1 + max((int(called[2].max(initial=0)) for called, _ in parts), default=0)
    steps = 2 + max((int(called[0].max(initial=0)) for called, _ in parts), default=0)
    packed = [
        ((each.attempt * steps + step + 1) * (len(names) or 1) + name) * turns + turn
        for each, ((step, name, turn), _) in zip(recordings, parts, strict=True)
    ]
    keys = np.unique(np.concatenate(packed)) if packed else np.zeros(0, np.int64)
    shape = (len(keys), len(recordings))
    came, moved, left = (np.zeros(shape, np.int64) for _ in range(3))
    took_part = np.zeros(shape, bool)
    for column, (key, (_, times)) in enumerate(zip(packed, parts, strict=True)):
        rows = np.searchsorted(keys, key)
        came[rows, column], moved[rows, column], left[rows, column] = times
        took_part[rows, column] = True
    several = took_part.sum(axis=1) > 1
    of_names = keys[several] // turns
    step, name = of_names // (len(names) or 1) % steps - 1, of_names % (len(names) or 1)
    order = np.lexsort((np.where(took_part, came, _NEVER)[several].min(axis=1), step)) if several.any() else slice(0)
    chosen = [each[several][order] for each in (came, moved, left, took_part)]
    return MatchedCollectives(step[order], name[order], names, *chosen)


def _called(recording: InstanceRecording, spans: Spans, numbers: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return an instance's collectives as (step, name, count of earlier ones with that name), and their three times.

    The times are when the instance came, when it saw that all had come, and when it left.
    """
    waits, transfers = spans.of(Sort.WAIT), spans.of(Sort.TRANSFER)
    waits = waits[~waits["failed"]]
    known = np.zeros(1 + max(recording.names, default=0), np.int64)
    for number, said in recording.names.items():
        known[number] = numbers.get(str(said["name"]), -1)
    step, name = waits["step"], known[waits["name"]]
    order = np.lexsort((waits["begin_ns"], name, step))
    step, name, waits, transfers = step[order], name[order], waits[order], transfers[order]
    is_new = np.append(True, (step[1:] != step[:-1]) | (name[1:] != name[:-1]))[: len(step)]
    starts = np.flatnonzero(is_new)
    turn = np.arange(len(step)) - starts[np.cumsum(is_new) - 1] if len(step) else np.zeros(0, np.int64)
    return np.array([step, name, turn]), np.array([waits["begin_ns"], waits["end_ns"], transfers["end_ns"]])
