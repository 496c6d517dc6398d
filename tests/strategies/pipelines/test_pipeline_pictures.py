"""Pictures of pipelines: as text, and with the fields of Perfetto's format."""

import json

import pytest

from strategies.pipelines.pictures import Panel, draw_text, perfetto, round_step, unit_of
from strategies.pipelines.schedules import SCHEDULES, schedule_named
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, placed


def panel(name, mapping, micro_batches, training=True, factor=1.0):
    timetable = schedule_named(name).timetable(placed(mapping), micro_batches, training)
    spans = [one._replace(begin_s=one.begin_s * factor, end_s=one.end_s * factor) for one in timetable.timed()]
    return Panel(name, tuple(spans), factor != 1)


GROUPED = """\
grouped

forward passes    |0                       |5                       |10                      |15
device 0 stage 0  F0---F1---F2---.....B0--------F3---B1--------.....B2--------.....B3--------U----
device 1 stage 1  .....F0---B0--------F1---B1--------F2---B2--------F3---B3--------U----..........

F forward, B backward, U update, each with the number of its micro-batch; . nothing to do
"""

SEQUENTIAL = """\
sequential

ms                |0             |20            |40            |60            |80
device 0 stage 0  F0-                  B0----F1-                  B1----U--
         stage 1     F0-         B0----         F1-         B1----         U--
         stage 2        F0-B0----                  F1-B1----                  U--
device 1 stage 1  ...F0-.........B0----.........F1-.........B1----U--............

F forward, B backward, U update, each with the number of its micro-batch; . nothing to do
"""


def test_dots_are_bubbles():
    assert draw_text(panel("grouped", [0, 1], 4)) == GROUPED


def test_a_device_has_a_line_for_each_of_its_stages_without_false_bubbles():
    assert draw_text(panel("sequential", [0, [0, 1], 0], 2, factor=0.004)) == SEQUENTIAL


@pytest.mark.parametrize("columns", [40, 72, 100, 160])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_lines_fit_the_width(name, columns):
    text = draw_text(panel(name, [0, 1, 2], 24), columns)
    assert max(map(len, text.splitlines())) <= columns


def lanes(text):
    """Return the lines of the first lane, without its name."""
    return [line[18:] for line in text.splitlines() if line.startswith("device 0 stage 0")]


def test_long_timetables_wrap_without_a_loss():
    text = draw_text(panel("grouped", [0, 1], 12))
    assert len(lanes(text)) > 1
    whole = "".join(lanes(text))
    assert [whole.count(f"{letter}{number}-") for letter in "FB" for number in range(12)] == [1] * 24
    assert "left out" not in text


def test_the_middle_of_long_pipelines_is_left_out():
    text = draw_text(panel("grouped", [0, 1], 400))
    assert text.count("(the middle is left out)") == 1
    assert len(lanes(text)) == 6
    assert lanes(text)[0].startswith("F0--")
    assert "B399" in lanes(text)[-1]
    assert "U" in lanes(text)[-1]


def test_a_number_that_would_be_cut_is_left_out():
    whole = [Timed(0, StageAction(ActionKind.FORWARD, 0, number), number, number + 1) for number in range(100, 161)]
    pieces = lanes(draw_text(Panel("", tuple(whole), False), 80))
    assert any(len(piece) % 5 for piece in pieces), "boundaries are in the middle of some of them"
    for piece in pieces:
        for cell in piece.replace("F", " F").split():
            assert cell.strip("-") in {"", "F", *(f"F{number}" for number in range(100, 161))}


def test_actions_that_take_no_time_are_seen():
    spans = (
        Timed(0, StageAction(ActionKind.FORWARD, 0, 0), 0, 1),
        Timed(0, StageAction(ActionKind.BACKWARD, 0, 0), 1, 3),
        Timed(0, StageAction(ActionKind.UPDATE, 0, None), 3, 3),
    )
    assert lanes(draw_text(Panel("", spans, False)))[0].endswith("-U")


def test_times_begin_where_the_first_action_does():
    there = panel("grouped", [0, 1], 4)
    later = Panel(there.title, tuple(s._replace(begin_s=s.begin_s + 7, end_s=s.end_s + 7) for s in there.spans), False)
    assert draw_text(later) == GROUPED


def test_too_few_columns_are_refused():
    with pytest.raises(ValueError, match="39 columns is too narrow; use 40 or more"):
        draw_text(panel("grouped", [0, 1], 4), 39)


def test_an_empty_trace_has_a_picture():
    assert draw_text(Panel("empty", (), True)).startswith("empty\n")


@pytest.mark.parametrize(
    ("length", "name", "said"),
    [(2.5, "s", "2.5 s"), (0.0123, "ms", "12.3 ms"), (4e-6, "us", "4 us"), (0, "us", "0 us")],
)
def test_units_fit_the_time(length, name, said):
    assert unit_of(length, True).name == name
    assert unit_of(length, True).said(length) == said


def test_units_of_pipelines_that_were_not_timed_are_forward_passes():
    assert unit_of(0.001, False).said(82.0) == "82 forward passes"


@pytest.mark.parametrize(
    ("at_least", "step"), [(1, 1), (1.1, 2), (2, 2), (2.5, 5), (6, 10), (51, 100), (0.03, 0.05), (0.3000001, 0.5)]
)
def test_steps_are_round_and_not_smaller(at_least, step):
    assert round_step(at_least) == pytest.approx(step)


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
