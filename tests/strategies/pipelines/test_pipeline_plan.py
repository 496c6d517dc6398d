"""Plans of pipelines: lengths, the picture, and the refusals of the pipeline itself."""

import re

import pytest

from strategies import FailedPreconditionError, pipelining_ops
from strategies.pipelines.plan import plan
from strategies.pipelines.timetable import PipelineSchedule


def test_length_and_bubbles_of_equal_stages():
    made = plan(4, 24)
    assert made.schedule == "grouped"
    assert made.length == (24 + 3) * 3 + 1
    assert made.bubble_share == pytest.approx(1 - 73 / 82)
    assert (made.stash, plan(4, 24, training=False).stash) == ((7, 5, 3, 1), (0, 0, 0, 0))
    assert plan(4, 24, "zero_bubble").bubble_share < made.bubble_share / 2.5
    assert plan(4, 24, "sequential").length == 24 * 4 * 3 + 1


def test_a_device_without_a_stage_is_no_bubble():
    assert plan(2, 4, device_mapping=[0, 2]).bubble_share == plan(2, 4).bubble_share


def test_recomputation_makes_backward_passes_longer_by_forward_passes():
    assert plan(4, 24, recompute=True).length == (24 + 3) * 4 + 1
    assert plan(4, 24, recompute=True).stash == plan(4, 24).stash


def test_a_plan_is_a_picture_below_its_numbers():
    made = plan(3, 6, device_mapping=[0, [0, 1], 1])
    first = "grouped: 3 stages on 2 devices, 6 micro-batches, 41 forward passes long, 7.3% bubbles"
    assert str(made) == made.text()
    assert str(made).splitlines()[0] == first
    assert str(plan(2, 4, recompute=True)).startswith("grouped with recomputation: 2 stages on 2 devices")
    assert str(plan(2, 4, training=False)).startswith("grouped, inference: 2 stages")


def test_the_picture_shows_the_same_timetable():
    made = plan(2, 4, PipelineSchedule.Interleaved)
    assert len(re.findall(r"\bF\d", made.text())) == 2 * 4


def test_stages_can_be_functions():
    def one():
        raise AssertionError("a plan runs nothing")

    assert plan([one, [one, one], one], 6, device_mapping=[0, [1, 2], 0]).stash == (5, 3, 1)
    assert plan(3, 6, device_mapping=[0, [1, 2], 0]).timetable.mapping == ((0,), (1, 2), (0,))


def test_a_stage_on_all_devices_has_the_devices_of_the_other_stages():
    assert plan(3, 6, device_mapping=[-1, 0, 1]).timetable.mapping == ((0, 1), (0,), (1,))
    assert plan(2, 4, device_mapping=[-1, 0], ipus_per_replica=4).timetable.mapping == ((0, 1, 2, 3), (0,))


def test_batch_serialization_keeps_one_micro_batch_per_iteration():
    made = plan(3, 8, batch_serialization_iterations=4)
    assert (made.schedule, made.stash, made.bubble_share) == ("sequential", (4, 4, 4), 0)


@pytest.mark.parametrize(
    ("error", "words", "arguments", "options"),
    [
        (ValueError, "at least two", (1, 8), {}),
        (TypeError, "computational_stages is 2.5", (2.5, 8), {}),
        (FailedPreconditionError, "must be a multiple of 3", (3, 10, "interleaved"), {"training": False}),
        (ValueError, "gradient_accumulation_count is missing", (3, None), {}),
        (ValueError, "Each stage must be mapped", (3, 6), {"device_mapping": range(4)}),
        (ValueError, r"stage 0 is one function, but mapped to \[\]", (2, 4), {"device_mapping": [[], 1]}),
        (ValueError, "a replica spans 2 devices", (3, 6), {"ipus_per_replica": 2}),
        (ValueError, "ipus_per_replica is 0", (3, 6), {"ipus_per_replica": 0}),
        (ValueError, "no pipeline schedule 'fast'", (3, 6, "fast"), {}),
        (NotImplementedError, "The pipelining schedule", (4, 4, "interleaved", [0, 1, [2, 3], 0]), {}),
    ],
)
def test_a_plan_refuses_the_arguments_that_a_pipeline_refuses(error, words, arguments, options):
    with pytest.raises(error, match=words):
        plan(*arguments, **options)


def test_the_names_of_the_module_are_described():
    assert list(pipelining_ops.__all__) == sorted(pipelining_ops.__all__)
    assert all(getattr(pipelining_ops, name).__doc__ for name in pipelining_ops.__all__)
