"""Traces of pipelines: their order, mean times, and advice on the stages."""

import json

import pytest

from strategies.pipelines.plan import plan
from strategies.pipelines.schedules import SCHEDULES
from strategies.pipelines.times import StageTimes
from strategies.pipelines.timetable import Timed
from strategies.pipelines.trace import Trace, observed

TIMES = StageTimes((0.01, 0.01, 0.02), (0.02, 0.02, 0.06), update=(0.001, 0.002, 0.003))


def trace(schedule="grouped", mapping=None, times=TIMES, recompute=False, replicas=(0,)):
    made = plan(3, 6, schedule, mapping, times=times, recompute=recompute)
    later = {r: tuple(s._replace(begin_s=s.begin_s + r, end_s=s.end_s + r) for s in made.spans) for r in replicas}
    return Trace(later, recompute)


REPEATED = [[0, 1, 0], [0, [0, 1], 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("schedule", "mapping"),
    [
        *((schedule, [0, 1, 2]) for schedule in sorted(SCHEDULES)),
        *((schedule, mapping) for schedule in ("grouped", "sequential", "zero_bubble") for mapping in REPEATED),
    ],
)
def test_a_trace_shows_the_timetable_that_was_followed(schedule, mapping):
    made = plan(3, 6, schedule, mapping, times=TIMES)
    seen = observed(sorted(made.spans, key=lambda span: span.end_s % 0.007))
    assert (seen.devices, seen.mapping) == (made.timetable.devices, made.timetable.mapping)
    assert seen.length(TIMES.durations()) == pytest.approx(made.length)


@pytest.mark.parametrize("training", [False, True])
def test_a_trace_shows_whether_micro_batches_go_in_turn(training):
    made = plan(2, 4, "sequential", training=training)
    assert observed(made.spans) == made.timetable
    assert not observed(plan(2, 4, "grouped", training=training).spans).in_turn


def test_a_part_of_an_update_is_refused():
    with pytest.raises(ValueError, match="lacks the"):
        observed(trace().replicas[0][:-1])


@pytest.mark.parametrize("replicas", [{}, {0: ()}])
def test_an_empty_trace_is_refused(replicas):
    with pytest.raises(ValueError, match="a trace needs actions"):
        Trace(replicas)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["grouped", "zero_bubble"])
def test_times_are_means_per_stage(schedule, recompute):
    found = trace(schedule, recompute=recompute, replicas=(2, 5)).times
    for name in ("forward", "backward", "update"):
        assert getattr(found, name) == pytest.approx(getattr(TIMES, name))


def test_length_and_bubbles_follow_from_the_replicas():
    made = plan(3, 6, times=TIMES)
    seen = trace(replicas=(0, 3))
    assert seen.length_s == pytest.approx(made.length)
    assert seen.bubble_share == pytest.approx(made.bubble_share)


def test_advice_names_the_slowest_stage_the_gain_of_an_even_cut_and_how_to_move_the_cuts():
    assert trace().advice() == (
        "stage 2 is the slowest: 80 ms for a micro-batch; the mean is 46.7 ms. With equal work on all devices an "
        "update would take 374 ms instead of 541 ms (both simulated): move the first 56% of stage 1 (16.7 ms) to stage "
        "0, the first 42% of stage 2 (33.3 ms) to stage 1"
    )


def test_advice_names_devices_if_they_have_several_stages():
    said = trace(mapping=[0, 1, 0]).advice()
    assert said.startswith("stage 2 is the slowest: 80 ms")
    assert said.endswith(
        "move the last 36% of stage 0 (10.9 ms) to stage 1, the first 36% of stage 2 (29.1 ms) to stage 1"
    )


def test_advice_promises_no_gain_if_there_is_none():
    even = StageTimes((0.01,) * 3, (0.02,) * 3)
    assert trace(times=even).advice().endswith("Other cuts would gain less than 1%")
    assert trace("sequential").advice().endswith("Other cuts would gain less than 1%")


def test_a_better_cut_is_found_for_known_parts():
    parts = StageTimes((0.01, 0.01, 0.01, 0.01), (0.02, 0.02, 0.03, 0.03))
    assert trace().better_cut(parts, (1, 1, 2)).sizes == (2, 1, 1)


TABLE = """\
replica 0, measured: 541 ms, 47.9% bubbles on 3 devices
replica 3, measured: 541 ms, 47.9% bubbles on 3 devices
times in ms, medians and (means)
stage           forward          backward  share of all
0               10 (10)           20 (20)         21.4%
1               10 (10)           20 (20)         21.4%
2               20 (20)           60 (60)         57.1%
"""


def test_a_trace_is_a_table_with_its_advice():
    seen = trace(replicas=(0, 3))
    assert str(seen) == TABLE + seen.advice()


def test_pictures_have_a_panel_for_each_replica():
    seen = trace(replicas=(0, 3))
    assert seen.text().count("measured: 541 ms") == 2
    assert {one["pid"] for one in json.loads(seen.perfetto())["traceEvents"]} == {0, 3}


def test_measured_times_make_a_plan():
    seen = trace()
    assert plan(3, 6, times=seen.times).length == pytest.approx(seen.length_s)


def test_traces_can_have_gaps():
    """A device that waits longer than necessary shows as bubbles, and changes no time of a stage."""
    slow = tuple(Timed(d, a, 3 * begin, 3 * begin + (end - begin)) for d, a, begin, end in trace().replicas[0])
    late = Trace({0: slow})
    assert late.times.forward == pytest.approx(TIMES.forward)
    assert late.bubble_share > trace().bubble_share
    assert late.advice() == trace().advice()
