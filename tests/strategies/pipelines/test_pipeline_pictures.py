"""Pictures of pipelines as text."""

import pytest

from strategies.pipelines.plan import FORWARDS, SECONDS, Trace, draw_text
from strategies.pipelines.timetable import SCHEDULES, ActionKind, StageAction, Timed, placed, schedule_named


def spans_of(name, mapping, micro_batches, training=True):
    return schedule_named(name).timetable(placed(mapping), micro_batches, training).timed()


def drawn(name, mapping, micro_batches, columns=100):
    return draw_text(name, spans_of(name, mapping, micro_batches), FORWARDS, columns)


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
    assert drawn("grouped", [0, 1], 4) == GROUPED


def test_a_device_has_a_line_for_each_of_its_stages_without_false_bubbles():
    spans = spans_of("sequential", [0, [0, 1], 0], 2)
    times = [one._replace(begin_s=one.begin_s * 0.004, end_s=one.end_s * 0.004) for one in spans]
    assert draw_text("sequential", times, SECONDS[1]) == SEQUENTIAL


@pytest.mark.parametrize("columns", [40, 72, 100, 160])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_lines_fit_the_width(name, columns):
    text = drawn(name, [0, 1, 2], 24, columns)
    assert max(map(len, text.splitlines())) <= columns


def lanes(text):
    """Return the lines of the first lane, without its name."""
    return [line[18:] for line in text.splitlines() if line.startswith("device 0 stage 0")]


def test_long_timetables_wrap_without_a_loss():
    text = drawn("grouped", [0, 1], 12)
    assert len(lanes(text)) > 1
    whole = "".join(lanes(text))
    assert [whole.count(f"{letter}{number}-") for letter in "FB" for number in range(12)] == [1] * 24
    assert "left out" not in text


def test_the_middle_of_long_pipelines_is_left_out():
    text = drawn("grouped", [0, 1], 400)
    assert text.count("(the middle is left out)") == 1
    assert len(lanes(text)) == 6
    assert lanes(text)[0].startswith("F0--")
    assert "B399" in lanes(text)[-1]
    assert "U" in lanes(text)[-1]


def test_a_number_that_would_be_cut_is_left_out():
    whole = [Timed(0, StageAction(ActionKind.FORWARD, 0, number), number, number + 1) for number in range(100, 161)]
    pieces = lanes(draw_text("", whole, FORWARDS, 80))
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
    assert lanes(draw_text("", spans, FORWARDS))[0].endswith("-U")


def test_times_begin_where_the_first_action_does():
    spans = spans_of("grouped", [0, 1], 4)
    later = [one._replace(begin_s=one.begin_s + 7, end_s=one.end_s + 7) for one in spans]
    assert draw_text("grouped", later, FORWARDS) == GROUPED


def test_too_few_columns_are_refused():
    with pytest.raises(ValueError, match="39 columns is too narrow; use 40 or more"):
        drawn("grouped", [0, 1], 4, 39)


@pytest.mark.parametrize("replicas", [{}, {0: ()}])
def test_an_empty_trace_is_refused(replicas):
    with pytest.raises(ValueError, match="a trace needs actions"):
        Trace(replicas)


@pytest.mark.parametrize(("factor", "said"), [(1, "16 s"), (2**-3, "2 s"), (2**-10, "15.6 ms"), (2**-20, "15.3 us")])
def test_a_trace_is_a_picture_for_each_replica_in_a_unit_that_fits(factor, said):
    spans = spans_of("grouped", [0, 1], 4)
    times = [one._replace(begin_s=one.begin_s * factor, end_s=one.end_s * factor) for one in spans]
    text = str(Trace({3: times, 0: times}))
    heads = [line for line in text.splitlines() if line.startswith("replica")]
    assert heads == [f"replica {number}, measured: {said}, 18.8% bubbles on 2 devices" for number in (0, 3)]
    assert text.count("device 1 stage 1") == 2
