"""Times of stages: given, measured, and of stages joined from parts."""

from statistics import fmean

import pytest

from strategies.pipelines.times import StageTimes, equal_times, measured_times
from strategies.pipelines.timetable import ActionKind, StageAction, Timed

F, B, BI, BW, U = ActionKind


def test_half_of_a_backward_pass_is_for_the_weights_by_default():
    assert StageTimes((1, 2), (3, 5)).weights == (1.5, 2.5)
    assert StageTimes((1, 2), (3, 5)).update == (0, 0)
    assert StageTimes((1, 2), (3, 5), (1, 0)).whole == (4, 7)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("2 times of forward passes, but 1 of backward", ((1, 2), (3,))),
        ("of stage 1 for forward is -2; it must be 0 or more", ((1, -2), (3, 4))),
        ("of stage 0 for backward is nan", ((1,), (float("nan"),))),
        ("of stage 0 for update is inf", ((1,), (1,), (0,), (float("inf"),))),
        ("stage 0 takes 4 for the weights' part .* but 3 for all of it", ((1,), (3,), (4,))),
    ],
)
def test_impossible_times_are_refused(words, arguments):
    with pytest.raises(ValueError, match=words):
        StageTimes(*arguments)


def test_recomputation_is_a_forward_pass_before_the_first_part_of_a_backward_pass():
    times = StageTimes((1,), (5,), (2,), (7,))
    assert times.durations() == {(F, 0): 1, (B, 0): 5, (BI, 0): 3, (BW, 0): 2, (U, 0): 7}
    assert times.durations(recompute=True) == {(F, 0): 1, (B, 0): 6, (BI, 0): 4, (BW, 0): 2, (U, 0): 7}


def test_stages_take_as_long_as_their_parts_together():
    parts = StageTimes((1, 2, 3, 4), (10, 20, 30, 40), (1, 1, 2, 2), (0, 0, 1, 5))
    assert parts.joined([1, 3]) == StageTimes((1, 9), (10, 90), (1, 5), (0, 6))
    for sizes in ([1, 2], [0, 4], [2, 3], []):
        with pytest.raises(ValueError, match="every stage needs at least one part, and every part a stage"):
            parts.joined(sizes)


def test_scaled_times_leave_updates():
    assert StageTimes((1, 2), (4, 6), (1, 2), (9, 9)).scaled((2, 0.5)) == StageTimes((2, 1), (8, 3), (2, 1), (9, 9))


def of(device, kind, stage, number, begin, end):
    return Timed(device, StageAction(kind, stage, number), begin, end)


def test_averages_are_over_micro_batches_and_replicas():
    first = [of(0, F, 0, 0, 0, 1), of(0, F, 0, 1, 1, 3), of(0, B, 0, 0, 3, 6), of(0, B, 0, 1, 6, 9)]
    second = [of(0, F, 0, 0, 5, 9), of(0, F, 0, 1, 9, 14), of(0, B, 0, 0, 20, 26), of(0, B, 0, 1, 30, 38)]
    assert measured_times([first, second], average=fmean) == StageTimes((3,), (5,))
    assert measured_times([first, second], True, fmean) == StageTimes((3,), (2,))
    assert measured_times([second]) == StageTimes((4.5,), (7,))


def test_a_pass_that_was_interrupted_does_not_change_a_median():
    spans = [of(0, F, 0, number, 0, 100 if number == 2 else 1) for number in range(5)]
    assert measured_times([spans]).forward == (1,)
    assert measured_times([spans], average=fmean).forward == (20.8,)


def test_a_stage_on_several_devices_takes_as_long_as_the_slowest():
    for times in ((1, 4), (4, 1)):
        assert measured_times([[of(device, F, 0, 0, 0, time) for device, time in enumerate(times)]]).forward == (4,)


def test_the_parts_of_a_backward_pass_are_measured_apart():
    spans = [of(0, F, 0, 0, 0, 2), of(0, BI, 0, 0, 2, 6), of(0, BW, 0, 0, 6, 9), of(0, U, 0, None, 9, 10)]
    assert measured_times([spans]) == StageTimes((2,), (7,), (3,), (1,))
    assert measured_times([spans], recompute=True) == StageTimes((2,), (5,), (3,), (1,))


def test_recomputation_never_makes_a_measured_time_negative():
    assert measured_times([[of(0, F, 0, 0, 0, 2)]], recompute=True).backward == (0,)


def test_unmeasured_stages_are_named():
    with pytest.raises(ValueError, match=r"no forward pass of stages \[0\] was measured"):
        measured_times([[of(0, F, 1, 0, 0, 1)]])


def test_timetables_without_durations_have_equal_stages():
    assert equal_times(2).durations() == {
        (F, 0): 1, (B, 0): 2, (BI, 0): 1, (BW, 0): 1, (U, 0): 1,
        (F, 1): 1, (B, 1): 2, (BI, 1): 1, (BW, 1): 1, (U, 1): 1,
    }  # fmt: skip
