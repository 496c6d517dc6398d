"""Schedules: the order of actions, the stash, the length, and freedom from deadlocks."""

import pytest

from strategies.pipelines.timetable import (
    SCHEDULES,
    ActionKind,
    PipelineSchedule,
    bubble_share,
    offsets,
    placed,
    schedule_named,
    serialized,
    visits,
)

COUNTS = range(1, 25)
EVERY = sorted(SCHEDULES)
REPEATED = [[0, 0], [0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 2, 0], [0, 1, 2, 3, 0], [0, 0, 2, 1, 0]]
CONCURRENT = [[0, [0, 1], 1], [[0, 1], 0, 1], [0, 1, [2, 3], 0], [0, [1, 1], 2]]


def timetable(name, mapping, micro_batches, training=True):
    return schedule_named(name).timetable(placed(mapping), micro_batches, training)


def length_of(made):
    return max(span.end_s for span in made.timed())


def bubbles_of(made):
    return bubble_share(made.timed(), len(made.devices))


def stashes(made):
    return [made.stash(stage) for stage in range(made.num_stages)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("stages", range(1, 6))
def test_one_device_per_stage_never_deadlocks(name, stages, training):
    for micro_batches in COUNTS:
        made = timetable(name, range(stages), micro_batches, training)
        each = 3 if made.has_split_backward else 2 if training else 1
        assert [len(actions) for actions in made.devices] == [each * micro_batches + training] * stages


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("mapping", REPEATED + CONCURRENT, ids=str)
def test_shared_devices_and_stages_on_several_devices_never_deadlock(name, mapping, training):
    if name == "interleaved" and training:
        with pytest.raises(NotImplementedError, match="The pipelining schedule 'Interleaved' trains with one stage"):
            timetable(name, mapping, 4)
        return
    for micro_batches in (*range(1, 8), 12, 24):
        made = timetable(name, mapping, micro_batches, training)
        assert made.mapping == placed(mapping)


@pytest.mark.parametrize(
    ("name", "of_stage_with_others_behind"),
    [
        ("grouped", lambda stages, behind: 2 * behind + 1),
        ("interleaved", lambda stages, behind: behind + 1),
        ("one_forward_one_backward", lambda stages, behind: behind + 1),
        ("sequential", lambda stages, behind: 1),
        ("zero_bubble", lambda stages, behind: stages),
    ],
)
def test_each_schedule_keeps_its_number_of_micro_batches(name, of_stage_with_others_behind):
    for stages in range(1, 6):
        expected = [of_stage_with_others_behind(stages, stages - 1 - stage) for stage in range(stages)]
        for micro_batches in COUNTS:
            kept = stashes(timetable(name, range(stages), micro_batches))
            assert kept == [min(one, micro_batches) for one in expected]


@pytest.mark.parametrize("mapping", REPEATED, ids=str)
def test_the_stash_depends_on_later_stages_and_not_on_their_devices(mapping):
    behind = range(len(mapping) - 1, -1, -1)
    assert stashes(timetable("grouped", mapping, 24)) == [2 * number + 1 for number in behind]
    assert stashes(timetable("sequential", mapping, 24)) == [1] * len(mapping)
    kept = stashes(timetable("one_forward_one_backward", mapping, 24))
    assert all(one <= number + 1 for one, number in zip(kept, behind, strict=True))


@pytest.mark.parametrize("name", ["grouped", "interleaved", "one_forward_one_backward"])
@pytest.mark.parametrize("stages", range(2, 6))
def test_bubbles_come_from_filling_and_emptying_the_pipeline(name, stages):
    """Each device works 3 for a micro-batch and 1 for the update; the first and the last device wait for each other."""
    made = timetable(name, range(stages), 20)
    assert length_of(made) == (20 + stages - 1) * 3 + 1
    assert bubbles_of(made) == pytest.approx(1 - 61 / length_of(made))
    assert length_of(timetable(name, range(stages), 20, training=False)) == 20 + stages - 1


@pytest.mark.parametrize("stages", range(2, 6))
def test_zero_bubble_has_a_third_of_the_bubbles(stages):
    made = timetable("zero_bubble", range(stages), 20)
    assert length_of(made) == 20 * 3 + (stages - 1) + 1
    assert bubbles_of(made) < bubbles_of(timetable("one_forward_one_backward", range(stages), 20)) / 2.5


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mapping", [[0, 1, 2], [0, 0], [0, [1, 2], 0]], ids=str)
def test_no_two_micro_batches_are_in_a_sequential_pipeline(mapping, training):
    made = timetable("sequential", mapping, 5, training)
    whole = {}
    for span in made.timed():
        if span.action.kind is not ActionKind.UPDATE:
            begin, end = whole.get(span.action.micro_batch, (span.begin_s, span.end_s))
            whole[span.action.micro_batch] = (min(begin, span.begin_s), max(end, span.end_s))
    assert all(whole[number][1] <= whole[number + 1][0] for number in range(4))


def test_one_forward_one_backward_is_interleaved_with_one_device_per_stage():
    for stages in range(1, 6):
        for micro_batches in COUNTS:
            made = timetable("one_forward_one_backward", range(stages), micro_batches)
            assert made == timetable("interleaved", range(stages), micro_batches)


def test_several_stages_on_a_device_shorten_the_bubbles():
    """Virtual stages work like this: a device has its next stage to do while others fill."""
    split = timetable("one_forward_one_backward", [0, 1, 0, 1], 16)
    assert bubbles_of(split) < 0.12


@pytest.mark.parametrize(
    ("name", "mapping", "inference", "training"),
    [
        ("grouped", [0, 1, 2], 3, 6),
        ("grouped", [0, 1, 0], 3, 6),
        ("interleaved", [0, 1, 2], 3, 3),
        ("interleaved", [0, 1, 2, 3], 4, 4),
        ("interleaved", [0, 0, 0], 1, 1),
        ("interleaved", [0, 1, 0], 1, None),
        ("interleaved", [0, 1, 2, 3, 0], 2, None),
        ("sequential", [0, 1, 2], 1, 1),
        ("one_forward_one_backward", [0, 1, 2], 1, 1),
        ("zero_bubble", [0, 1, 2], 1, 1),
    ],
)
def test_schedules_take_the_numbers_of_micro_batches_of_the_original(name, mapping, inference, training):
    overlap = schedule_named(name).overlap
    assert overlap(placed(mapping), False) == inference
    if training is not None:
        assert overlap(placed(mapping), True) == training


def test_offsets_of_the_interleaved_schedule_never_meet():
    """The table has a row for each slot, with the device of each micro-batch."""
    for mapping in [*REPEATED, *CONCURRENT, [0], [0, 1, 2, 3], [0, [1, 2], 3]]:
        for training in (False, True):
            there = visits(placed(mapping), training)
            for slot in range(len(there)):
                devices = [there[(slot - offset) % len(there)] for offset in offsets(placed(mapping), training)]
                assert len(frozenset().union(*devices)) == sum(map(len, devices))


def test_stages_that_take_several_micro_batches_one_after_another_keep_them():
    made = serialized(placed([0, 0, 0]), 12, True, 4)
    assert stashes(made) == [4, 4, 4]
    first = [(action.stage, action.micro_batch) for action in made.devices[0][:5]]
    assert first == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert serialized(placed([0, 0]), 6, True, 1).devices == timetable("sequential", [0, 0], 6).devices


def test_stages_that_take_several_micro_batches_are_on_one_device():
    with pytest.raises(NotImplementedError, match="needs all stages on one device"):
        serialized(placed([0, 1, 0]), 4, True, 4)
    with pytest.raises(ValueError, match="there are 6 micro-batches, but batch_serialization_iterations is 4; use"):
        serialized(placed([0, 0]), 6, True, 4)


def test_the_enum_extends_that_of_the_original():
    assert [one.value for one in PipelineSchedule][:3] == [0, 1, 2]
    assert PipelineSchedule(0) is PipelineSchedule.Grouped
    assert sorted(schedule_named(one).name for one in PipelineSchedule) == EVERY


@pytest.mark.parametrize("name", ["ZeroBubble", "zero_bubble", PipelineSchedule.ZeroBubble])
def test_spellings_of_a_schedule_have_one_name(name):
    assert schedule_named(name) is SCHEDULES["zero_bubble"]


def test_unknown_schedules_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no pipeline schedule 'gruoped'; use one of grouped, interleaved"):
        schedule_named("gruoped")
    with pytest.raises(TypeError, match="the pipeline schedule is 0, a int"):
        schedule_named(0)
