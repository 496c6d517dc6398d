"""schedule="auto": the chosen schedule, and the reason."""

import itertools
import random

import pytest

from strategies.pipelines.advice import MIB, choose
from strategies.pipelines.schedules import SCHEDULES, schedule_named
from strategies.pipelines.times import StageTimes, StashBytes
from strategies.pipelines.timetable import placed

TIMES = StageTimes((0.01,) * 4, (0.02,) * 4, update=(0.002,) * 4)
STASH = StashBytes((40 * MIB,) * 4, (2 * MIB,) * 4)
FOUR = placed(range(4))


def chosen(limit_mib, count=12, times=TIMES, stash=STASH, mapping=FOUR):
    limit = None if limit_mib is None else int(limit_mib * MIB)
    one = choose(times, stash, mapping, count, limit).chosen
    return one.schedule, one.recompute


def table_of(name, mapping=FOUR, count=24):
    return schedule_named(name).timetable(mapping, count, True)


def test_the_bytes_of_a_stage_are_the_sum_over_its_micro_batches():
    for name, expected in (("grouped", (7, 5, 3, 1)), ("interleaved", (4, 3, 2, 1)), ("sequential", (1, 1, 1, 1))):
        assert STASH.greatest(table_of(name), False) == tuple(40 * MIB * number for number in expected)
        assert STASH.greatest(table_of(name), True) == tuple((2 * number + 40) * MIB for number in expected)


def test_the_memory_of_a_device_is_the_simultaneous_stash_of_its_stages():
    stash = StashBytes((1, 10, 100), (0, 0, 0))
    made = schedule_named("sequential").timetable(placed([0, 1, 0]), 4, True)
    assert stash.greatest(made, False) == (101, 10)
    assert stash.greatest(made, True) == (100, 10)


def test_the_backward_part_for_the_weights_frees_memory():
    stash = StashBytes((1,) * 4, (0,) * 4)
    assert stash.greatest(table_of("zero_bubble"), False) == (4, 4, 4, 4)


def test_recomputed_activations_are_kept_between_the_parts_of_a_backward_pass():
    """Stage k is behind by k micro-batches with the parts for the weights."""
    stash = StashBytes((1,) * 4, (0,) * 4)
    assert stash.greatest(table_of("zero_bubble"), True) == (1, 2, 3, 4)
    assert stash.greatest(table_of("grouped"), True) == (1, 1, 1, 1)


def test_inference_keeps_nothing():
    made = schedule_named("grouped").timetable(FOUR, 8, False)
    assert STASH.greatest(made, False) == STASH.greatest(made, True) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("limit_mib", "expected"),
    [
        (None, ("zero_bubble", False)),
        (160, ("zero_bubble", False)),
        (159, ("interleaved", True)),
        (48, ("interleaved", True)),
        (47, ("sequential", False)),
        (40, ("sequential", False)),
    ],
)
def test_the_fastest_that_fits_is_chosen(limit_mib, expected):
    assert chosen(limit_mib) == expected


def test_the_choice_fits_and_every_faster_one_does_not(seed):
    """Stages and limits are random."""
    rng = random.Random(seed)
    for _ in range(8):
        stages = rng.randint(2, 4)
        times = StageTimes(*(tuple(rng.uniform(1, 9) for _ in range(stages)) for _ in range(2)))
        stash = StashBytes(*(tuple(rng.randint(1, most) for _ in range(stages)) for most in (90, 9)))
        limit = rng.randint(150, 400)
        mapping = placed([rng.randrange(stages) for _ in range(stages)])
        count = rng.choice([6, 7, 8, 12])
        found = choose(times, stash, mapping, count, limit)
        assert found.chosen.most_bytes <= limit
        for other in found.others:
            assert other.most_bytes > limit or other.length_s >= found.chosen.length_s * (1 - 1e-5)


def test_equally_fast_schedules_are_decided_by_memory():
    slow_weights = StageTimes((0.01,) * 4, (0.02,) * 4, (0.0,) * 4)
    names = [chosen(None, times=slow_weights)[0]]
    lengths = {
        name: round(table_of(name).length(slow_weights.durations()), 9)
        for name in ("grouped", "interleaved", "zero_bubble")
    }
    assert len(set(lengths.values())) == 1
    assert names == ["interleaved"]


def test_recomputation_without_a_cost_is_chosen_if_it_keeps_less():
    free = StageTimes((0.0,) * 4, (0.02,) * 4, (0.0,) * 4)
    assert chosen(None, times=free) == ("interleaved", True)
    assert chosen(None, times=free, stash=StashBytes((MIB,) * 4, (MIB,) * 4)) == ("interleaved", False)


def test_schedules_that_do_not_take_the_number_or_the_mapping_are_left_out():
    of_seven = choose(TIMES, STASH, FOUR, 7)
    names = {one.schedule for one in (of_seven.chosen, *of_seven.others)}
    assert names == set(SCHEDULES) - {"grouped", "interleaved"}
    repeated = choose(TIMES, STASH, placed([0, 1, 1, 0]), 8)
    assert {one.schedule for one in (repeated.chosen, *repeated.others)} == set(SCHEDULES) - {"interleaved"}


def test_each_schedule_is_tried_with_and_without_recomputation_and_the_best_comes_first():
    found = choose(TIMES, STASH, FOUR, 24)
    assert len(found.others) == 2 * len(SCHEDULES) - 1
    lengths = [one.length_s for one in (found.chosen, *found.others)]
    assert all(before <= after * (1 + 1e-5) for before, after in itertools.pairwise(lengths))


def test_the_reason_is_a_sentence_with_the_numbers():
    assert choose(TIMES, STASH, FOUR, 24).reason == (
        "zero_bubble was chosen: 752 ms for an update is the shortest of 10 ways to run it, and it keeps 160 MiB; "
        "interleaved would take 812 ms and keep 160 MiB"
    )
    assert choose(TIMES, STASH, FOUR, 24, 120 * MIB).reason == (
        "interleaved with recomputation was chosen: 1.08 s for an update is the shortest of 5 of 10 ways to run it "
        "that keep at most 120 MiB on a device, and it keeps 48 MiB; zero_bubble would take 752 ms, but keep 160 MiB"
    )


def test_the_error_names_the_smallest_limit_if_nothing_fits():
    with pytest.raises(ValueError, match=r"at most 39\.5 MiB on a device: sequential keeps the least, 40 MiB; allow"):
        chosen(39.5)


def test_all_stages_need_times_and_bytes():
    with pytest.raises(ValueError, match="4 stages, but times of 4, and bytes of 3 and 4; give all of them for each"):
        choose(TIMES, StashBytes((1,) * 3, (1,) * 4), FOUR, 8)


def test_equal_arguments_give_equal_choices():
    assert choose(TIMES, STASH, FOUR, 8, 100 * MIB) == choose(TIMES, STASH, FOUR, 8, 100 * MIB)
