"""Pairs that a report must tell apart: failed and matched collectives, sums and maxima, means and medians."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from timeline_jobs import MS, NAMES, Made

from popdist.timeline.events import EventKind
from poprun.trace.aligned import align
from poprun.trace.merging import put_together
from poprun.trace.recordings import InstanceRecording
from poprun.trace.report.findings import Cause
from poprun.trace.report.step_table import COMPUTE, table_of
from poprun.trace.report.verdict import judge
from poprun.trace.spans import COMPILE, Sort, spans_of


def places(recording: InstanceRecording, kind: EventKind) -> np.ndarray:
    """Return the positions of the events of a kind."""
    return np.flatnonzero(recording.events["kind"] == kind)


def with_event(recording: InstanceRecording, place: int, kind: EventKind, **more: int) -> InstanceRecording:
    """Insert an event before a position, at the time of its successor."""
    event = recording.events[place : place + 1].copy()
    event["kind"] = kind
    for field, value in more.items():
        event[field] = value
    events = [recording.events[:place], event, recording.events[place:]]
    return replace(recording, events=np.concatenate(events))


def later(recording: InstanceRecording, place: int, ns: int) -> InstanceRecording:
    """Delay the events from a position on."""
    events = recording.events.copy()
    events["when_ns"][place:] += ns
    return replace(recording, events=events)


def culprit_of(made: Made):
    return judge(put_together(made.recordings())).culprit


class TestACollectiveThatFails:
    @pytest.fixture
    def recordings(self):
        """Return recordings of an instance 0 that began the collective of step 3 twice; the first attempt failed."""
        first, second = Made(2, steps=6).recordings()
        return with_event(first, places(first, EventKind.OPERATION_BEGINS)[3], EventKind.OPERATION_BEGINS), second

    def test_a_failed_collective_is_matched_with_none(self, recordings):
        meetings = put_together(recordings).meetings
        assert meetings.step.tolist() == [0, 1, 2, 3, 4, 5]
        assert meetings.took_part.all()
        assert np.all(meetings.left_ns - meetings.moved_ns == np.int64(1_001_000))

    def test_a_failed_collective_counts_as_waiting(self, recordings):
        waits = spans_of(recordings[0]).of(Sort.WAIT)
        assert waits["failed"].sum() == 1
        assert len(waits) == 7
        assert len(spans_of(recordings[0]).of(Sort.OPERATION)) == 0


def test_collectives_with_one_name_in_one_step_are_matched_in_order():
    """Two steps are merged into one."""
    merged = []
    for each in Made(2, steps=5).recordings():
        gone = [places(each, EventKind.STEP_ENDS)[1], places(each, EventKind.STEP_BEGINS)[2]]
        merged.append(replace(each, events=np.delete(each.events, gone)))
    meetings = put_together(merged).meetings
    assert meetings.step.tolist() == [0, 1, 1, 3, 4]
    assert np.all(np.diff(meetings.came_ns[:, 0]) > 0)


class TestMedians:
    """The usual value is the median of the others, one of whom is unusual."""

    def test_the_cause_of_lateness_is_relative_to_the_median(self):
        """One other instance waits for its data, as the late one does, and computes little."""
        culprit = culprit_of(Made(4, input_ms={1: 10, 3: 9}, compute_ms={3: 1}, jitter=0.0))
        assert (culprit.instance, culprit.cause) == (1, Cause.INPUT)
        assert culprit.explained > 0.95

    def test_lateness_is_relative_to_the_median(self):
        often = {(1, step): 10 for step in range(2, 60, 3)}
        culprit = culprit_of(Made(2, compute_ms={1: 14}, delays_ms=often, jitter=0.0))
        assert culprit.late_s == pytest.approx(0.004, rel=0.05)

    def test_core_waits_are_relative_to_the_median(self):
        """One other instance waits for cores, too, and has time for that."""
        culprit = culprit_of(Made(4, compute_ms={1: 14, 3: 5}, core_wait_ms={1: 3.8, 3: 8}))
        assert (culprit.instance, culprit.cause) == (1, Cause.HOST)

    def test_clock_exchanges_are_judged_by_their_median(self):
        first, second = (
            later(each, places(each, EventKind.DATA_MOVES)[2] + 1, 100 * MS) for each in Made(2).recordings()
        )
        events = second.events.copy()
        events["when_ns"] -= 5 * 10**9
        sent = -5 * 10**9
        exchanges = np.array([[sent, sent + 5 * 10**9 + 5 * MS, sent + 5 * 10**9 + 5 * MS, sent + 10 * MS]])
        second = replace(second, clock="two", asked_clock="one", events=events, exchanges=exchanges)
        (said,) = put_together([first, second]).warnings
        assert "half of the exchanges took less than 1001 us; do not trust their order between hosts" in said


def test_two_instances_that_are_late_in_turn_are_not_blamed():
    in_turn = {(1 + step % 2, step): 10 for step in range(200)}
    assert culprit_of(Made(3, steps=200, delays_ms=in_turn, jitter=0.0)) is None


def test_compilation_inside_of_compute_is_counted_once():
    (recording,) = Made(1, steps=6, jitter=0.0).recordings()
    place = next(p for p in places(recording, EventKind.PHASE_ENDS) if p > places(recording, EventKind.STEP_BEGINS)[4])
    number = NAMES.index("compile")
    compiled = with_event(recording, place, EventKind.PHASE_BEGINS, name=number)
    compiled = later(compiled, place + 1, 5 * MS)
    compiled = with_event(compiled, place + 1, EventKind.PHASE_ENDS, name=number)
    table = table_of(put_together([compiled]))
    assert table.of[COMPILE][0].tolist() == [0, 0, 0, 0, 5 * MS, 0]
    assert table.of[COMPUTE][0, 4] == table.of[COMPUTE][0, 3]


def test_a_step_begins_after_an_evaluation():
    (recording,) = Made(1, steps=6).recordings()
    place = places(recording, EventKind.STEP_ENDS)[2] + 1
    evaluated = later(with_event(recording, place, EventKind.STEP_BEGINS, value=2), place + 1, 500 * MS)
    table = table_of(put_together([evaluated]))
    assert table.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert table.lasted_ns.max() < 20 * MS, "from its data on"


def test_wall_clocks_are_compared_at_the_start_of_each_recording():
    first, second = Made(2).recordings()
    _, aligned = align([first, replace(second, clock="two", began_ns=10**9, began_at_s=100.0)])
    assert not aligned.is_measured
    assert aligned.ahead_ns == 99e9
