"""Traces for Perfetto: the fields that its format demands."""

import json

import pytest

from strategies.pipelines.pictures import perfetto
from strategies.pipelines.schedules import schedule_named
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, placed


@pytest.fixture
def events():
    spans = schedule_named("zero_bubble").timetable(placed([0, 1, 2]), 6, True).timed()
    return json.loads(perfetto({3: spans, 5: spans}))["traceEvents"]


def test_processes_are_replicas_and_threads_are_devices(events):
    named = {(one["name"], one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M"}
    assert named == {
        **{("process_name", replica, 0): f"replica {replica}" for replica in (3, 5)},
        **{("thread_name", replica, device): f"device {device}" for replica in (3, 5) for device in range(3)},
    }


def test_every_event_has_the_fields_of_its_kind(events):
    assert {one["ph"] for one in events} == {"M", "X"}
    for one in events:
        assert isinstance(one["name"], str)
        assert isinstance(one["pid"], int)
        assert isinstance(one["tid"], int)
        if one["ph"] == "X":
            assert isinstance(one["cat"], str)
            assert one["ts"] >= 0
            assert one["dur"] >= 0
            assert set(one["args"]) == {"kind", "stage", "micro_batch"}


def test_events_of_a_thread_do_not_overlap_and_are_in_order(events):
    for replica in (3, 5):
        for device in range(3):
            times = [
                (one["ts"], one["ts"] + one["dur"])
                for one in events
                if one["ph"] == "X" and (one["pid"], one["tid"]) == (replica, device)
            ]
            assert len(times) == 6 * 3 + 1
            assert all(before[1] <= after[0] for before, after in zip(times, times[1:], strict=False))


def test_times_are_microseconds():
    text = perfetto({0: [Timed(1, StageAction(ActionKind.BACKWARD, 2, 3), 0.5, 0.502)]})
    (event,) = [one for one in json.loads(text)["traceEvents"] if one["ph"] == "X"]
    assert event["ts"] == 500_000
    assert event["dur"] == pytest.approx(2000)
    assert (event["tid"], event["name"], event["cat"]) == (1, "B3 stage 2", "backward")
    assert json.loads(text)["displayTimeUnit"] == "ms"
