"""Device mappings, and the numbers of micro-batches that a pipeline takes."""

import numpy as np
import pytest

import strategies
from strategies.pipelines.stages import check_no_idle_devices, checked_count, places_of, schedule_for
from strategies.pipelines.timetable import PipelineSchedule, placed, schedule_named


def stage(x):
    return x


def places(mapping, stages=3, ipus=4, **more):
    return places_of([stage] * stages if isinstance(stages, int) else stages, mapping, ipus, **more)


def test_by_default_each_stage_has_a_device():
    assert places(None) == ((0,), (1,), (2,))


def test_batch_serialization_puts_all_stages_on_one_device():
    assert places(None, batch_serialization_iterations=4) == ((0,), (0,), (0,))
    assert places(None, [stage, [stage, stage]], batch_serialization_iterations=2) == ((0,), (0, 0))


@pytest.mark.parametrize("mapping", [[0, 1, 3], [0, 1, 0], (2, 1, 0), range(1, 4), [0, 0, 0]], ids=str)
def test_stages_are_on_any_devices(mapping):
    """The original's own tests skip a device: [0, 1, 3]."""
    assert places(mapping) == tuple((device,) for device in mapping)


def test_a_stage_on_all_devices_leaves_none_without_work():
    check_no_idle_devices([0, -1, 2])
    with pytest.raises(ValueError, match="leaves out device 1, which would be idle"):
        check_no_idle_devices([0, 0, 2])


def test_numbers_of_numpy_and_other_libraries_are_accepted():
    assert places(list(np.arange(3))) == ((0,), (1,), (2,))


def test_a_list_of_functions_has_a_list_of_devices():
    assert places([0, [1, 2], 1], [stage, [stage, stage], stage]) == ((0,), (1, 2), (1,))


def test_a_stage_on_all_devices_has_every_device():
    assert places([-1, 0, 1], ipus=3) == ((0, 1, 2), (0,), (1,))


WHOLE = "stage 1 is mapped to"
FEW = "Each stage must be mapped to an IPU: there are 3 stages"


@pytest.mark.parametrize(
    ("mapping", "error", "words"),
    [
        *((each, TypeError, "device_mapping is") for each in (1, "012", {0: 1}, 0.5, np.arange(3))),
        *((each, ValueError, FEW) for each in (range(4), (0,), [], [0, 1])),
        *(([0, device, 2], TypeError, WHOLE) for device in ("1", 1.0, None, True)),
        *(
            ([0, device, 2], ValueError, f"{WHOLE} device {device}, but a replica spans 4 devices: use")
            for device in (-2, 4, 100)
        ),
    ],
    ids=str,
)
def test_a_mapping_is_a_list_with_one_of_the_replicas_devices_for_each_stage(mapping, error, words):
    with pytest.raises(error, match=words):
        places(mapping)


def test_the_default_mapping_needs_enough_devices():
    with pytest.raises(ValueError, match="stage 2 is mapped to device 2, but a replica spans 2 devices"):
        places(None, ipus=2)


@pytest.mark.parametrize(
    ("stages", "mapping", "error", "words"),
    [
        ([stage, [stage, stage]], None, ValueError, "stage 1 is a list of functions, but there is no device_mapping"),
        ([stage, [stage, stage]], [0, 1], ValueError, "stage 1 is a list of 2 functions, but mapped to 1"),
        ([stage, [stage, stage]], [0, [1]], ValueError, "give it a list of 2 devices"),
        ([stage, [stage, stage]], [0, [1, -1]], ValueError, "device -1"),
        ([stage, [stage, stage]], [0, [1, [2]]], ValueError, "cannot be nested"),
        ([stage, [stage, [stage]]], [0, [1, 2]], ValueError, "cannot be nested"),
        ([stage, []], [0, []], ValueError, "an empty list"),
        ([stage, [stage, 3]], [0, [1, 2]], TypeError, "stage 1 has 3 among its functions"),
        ([stage, "stage"], [0, 1], TypeError, "stage 1 is 'stage'"),
        ([stage, stage], [0, [1]], ValueError, "stage 1 is one function"),
        ([stage], None, ValueError, "Pipeline requires at least two computational stages, but has 1"),
        ([], None, ValueError, "Pipeline requires at least two computational stages, but has 0"),
    ],
)
def test_lists_of_functions_and_of_devices_belong_together(stages, mapping, error, words):
    with pytest.raises(error, match=words):
        places(mapping, stages)


def test_the_schedule_is_grouped_and_sequential_with_batch_serialization():
    assert schedule_for(None).name == "grouped"
    assert schedule_for(None, 4).name == "sequential"
    assert schedule_for(PipelineSchedule.Interleaved).name == "interleaved"
    assert schedule_for("Sequential", 4).name == "sequential"


def test_batch_serialization_has_no_other_schedule():
    with pytest.raises(NotImplementedError, match="batch serialization is for the Sequential schedule"):
        schedule_for(PipelineSchedule.Grouped, 4)


@pytest.mark.parametrize(("iterations", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_iterations_of_a_stage_are_counted_from_one(iterations, error):
    with pytest.raises(error, match="batch_serialization_iterations is"):
        schedule_for(None, iterations)


@pytest.mark.parametrize("name", [PipelineSchedule.Grouped, PipelineSchedule.Interleaved])
def test_the_number_of_micro_batches_is_a_multiple_of_those_in_flight(name):
    schedule = schedule_named(name)
    assert checked_count(12, schedule, placed([0, 1, 2]), training=False) == 12
    with pytest.raises(
        strategies.FailedPreconditionError,
        match=r"^The number of iterations of the pipeline must be a multiple of 3: .* is 10; use 9 or 12",
    ):
        checked_count(10, schedule, placed([0, 1, 2]), training=False)


def test_fewer_micro_batches_than_in_flight_are_refused():
    with pytest.raises(strategies.FailedPreconditionError, match=r"multiple of 6: .* is 5; use 6 \("):
        checked_count(5, schedule_named("grouped"), placed([0, 1, 2]))


@pytest.mark.parametrize("count", range(1, 25))
def test_the_other_schedules_take_any_number(count):
    for name in ("sequential", "one_forward_one_backward", "zero_bubble"):
        assert checked_count(count, schedule_named(name), placed([0, 1, 2])) == count


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [
        (None, ValueError, "is missing"),
        (0, ValueError, "at least 1"),
        (-1, ValueError, "at least 1"),
        (2**31, ValueError, "at most 2147483647"),
        (1.5, TypeError, "an integer of at least 1 is needed"),
        (True, TypeError, "an integer of at least 1 is needed"),
    ],
)
def test_the_number_of_micro_batches_is_a_number(count, error, words):
    with pytest.raises(error, match=f"gradient_accumulation_count.*{words}"):
        checked_count(count, schedule_named("sequential"), placed([0, 1]))
