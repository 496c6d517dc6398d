"""Cuts of a model into stages: the evenest cut, its gain, and cases without a gain."""

import itertools
import random

import pytest

from strategies.pipelines.advice import Move, better_cut, even_length, evenest, loads, moves, slowest
from strategies.pipelines.schedules import schedule_named
from strategies.pipelines.times import StageTimes
from strategies.pipelines.timetable import placed


def timetable(name, mapping, count=8):
    return schedule_named(name).timetable(placed(mapping), count, True)


def cuts_of(number, stages):
    for bounds in itertools.combinations(range(1, number), stages - 1):
        ends = (0, *bounds, number)
        yield tuple(after - before for before, after in itertools.pairwise(ends))


def longest(times, sizes):
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(times[before:after]) for before, after in itertools.pairwise(ends))


def test_no_cut_has_a_shorter_longest_group(seed):
    rng = random.Random(seed)
    for _ in range(60):
        times = [rng.choice([0, 1, 2, rng.uniform(0, 9)]) for _ in range(rng.randint(1, 9))]
        stages = rng.randint(1, len(times))
        found = evenest(times, stages)
        assert sum(found) == len(times)
        assert min(found) >= 1
        assert longest(times, found) == pytest.approx(min(longest(times, each) for each in cuts_of(len(times), stages)))


def test_more_stages_than_parts_are_refused():
    with pytest.raises(ValueError, match="2 parts cannot be cut into 3 stages"):
        evenest([1, 2], 3)
    with pytest.raises(ValueError, match="num_stages is 0"):
        evenest([1, 2], 0)


def test_the_slowest_stage_has_the_longest_passes_together():
    assert slowest(StageTimes((1, 5, 2), (9, 1, 8))) == 0
    assert slowest(StageTimes((1, 5, 2), (2, 6, 9))) == 1


def test_a_device_has_the_load_of_all_of_its_stages():
    made = timetable("grouped", [0, [1, 1], [0, 1]], 6)
    assert loads(made, StageTimes((1, 2, 3), (1, 2, 3))) == [2 + 6, 4 + 6]


def test_cuts_move_until_all_devices_have_equally_much_to_do():
    made = timetable("grouped", [0, 1, 2], 6)
    times = StageTimes((1, 3, 2), (2, 6, 4))
    [move] = moves(made, times)
    assert move == Move(1, 0, pytest.approx(3), pytest.approx(1 / 3))
    [move] = moves(made, StageTimes((3, 1, 2), (6, 2, 4)))
    assert move == Move(0, 1, pytest.approx(3), pytest.approx(1 / 3))
    far = moves(made, StageTimes((4, 1, 1), (8, 2, 2)))
    assert far == (Move(0, 1, 6, 0.5), Move(1, 2, 3, 1.0))
    assert str(far[0]) == "the last 50% of stage 0 (6 s) to stage 1"
    assert not moves(made, StageTimes((1, 1, 1), (2, 2, 2)))


@pytest.mark.parametrize("mapping", [[0, 1, 2], [0, 1, 0]], ids=str)
def test_with_equal_loads_nothing_is_gained(mapping):
    made = timetable("grouped", mapping, 6)
    times = StageTimes((1, 2, 1), (2, 4, 2)) if mapping[2] == 0 else StageTimes((1, 1, 1), (2, 2, 2))
    assert even_length(made, times) == pytest.approx(made.length(times.durations()))


def test_an_even_cut_has_the_length_of_mean_times():
    made = timetable("grouped", [0, 1])
    uneven = StageTimes((1, 3), (2, 6))
    assert even_length(made, uneven) == made.length(StageTimes((2, 2), (4, 4)).durations())
    assert even_length(made, uneven) < made.length(uneven.durations())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_part_is_moved_to_the_stage_that_has_less(recompute):
    parts = StageTimes((1e-3,) * 8, (2e-3,) * 8)
    found = better_cut(timetable("grouped", [0, 1]), parts, (6, 2), recompute)
    assert found.sizes == (4, 4)
    assert (
        found.before_s
        > found.length_s
        == timetable("grouped", [0, 1]).length(parts.joined((4, 4)).durations(recompute))
    )
    assert f"{found}".startswith("stages of [4, 4] parts would shorten an update from ")
    assert f"by {found.gain:.0%}" in str(found)


def test_the_advice_says_if_no_cut_is_better():
    parts = StageTimes((1e-3,) * 8, (2e-3,) * 8)
    even = better_cut(timetable("grouped", [0, 1]), parts, (4, 4))
    assert (even.sizes, even.gain) == ((4, 4), 0)
    assert str(even) == "no cut of these parts was found that makes an update 1% shorter than 108 ms"
    in_turn = better_cut(timetable("sequential", [0, 1]), parts, (6, 2))
    assert in_turn.sizes == (6, 2), "stages that never run at the same time are as fast however they are cut"


def test_the_found_cut_is_never_worse_than_the_given_one(seed):
    rng = random.Random(seed)
    for _ in range(15):
        number, stages = rng.randint(3, 9), 3
        parts = StageTimes(*(tuple(rng.uniform(0, 5) for _ in range(number)) for _ in range(2)))
        mapping = rng.choice([[0, 1, 2], [0, 1, 0], [0, 0, 1], [0, [0, 1], 1]])
        sizes = rng.choice(list(cuts_of(number, stages)))
        made = timetable("one_forward_one_backward", mapping, 5)
        found = better_cut(made, parts, sizes)
        assert found.length_s == pytest.approx(made.length(parts.joined(found.sizes).durations()))
        assert found.length_s <= found.before_s == pytest.approx(made.length(parts.joined(sizes).durations()))


def test_the_slowest_stage_is_minimal_with_one_device_per_stage(seed):
    rng = random.Random(seed)
    made = timetable("one_forward_one_backward", range(4), 6)
    changed = 0
    for _ in range(25):
        parts = StageTimes(*(tuple(rng.choice([1, 1, 2, 9]) for _ in range(9)) for _ in range(2)))
        sizes = rng.choice(list(cuts_of(9, 4)))
        found = better_cut(made, parts, sizes).sizes
        if found != sizes:
            changed += 1
            assert longest(parts.whole, found) == min(longest(parts.whole, each) for each in cuts_of(9, 4))
    assert changed > 10


def test_a_device_with_two_stages_gets_as_much_as_one_with_one():
    parts = StageTimes((1.0,) * 8, (2.0,) * 8)
    found = better_cut(timetable("one_forward_one_backward", [0, 1, 0], 12), parts, (3, 2, 3))
    assert found.sizes[1] == 4


def test_sizes_are_those_of_the_stages():
    with pytest.raises(ValueError, match="sizes of 3 stages are given, but the pipeline has 2"):
        better_cut(timetable("grouped", [0, 1]), StageTimes((1,) * 3, (1,) * 3), (1, 1, 1))
