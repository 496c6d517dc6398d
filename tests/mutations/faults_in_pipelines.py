"""Faults by which a pipeline computes something else than its stages one after another."""

from __future__ import annotations

from fault import Fault

IN_PIPELINES = (
    Fault(
        name="a schedule may leave out a backward pass",
        path="strategies/pipelines/timetable.py",
        old="if missing := expected - seen:",
        new="if missing := {each for each in expected - seen if each.kind is Kind.FORWARD}:",
        caught_by=("tests/strategies/pipelines/test_pipeline_timetable.py::test_impossible_lists_are_refused",),
    ),
    Fault(
        name="a schedule may add the gradients of a stage in another order",
        path="strategies/pipelines/timetable.py",
        old="if action.micro_batch < before:",
        new="if False:",
        caught_by=(
            "tests/strategies/pipelines/test_pipeline_timetable.py::test_micro_batches_do_not_overtake_each_other",
        ),
    ),
    Fault(
        name="a backward pass need not wait for that of the stage behind",
        path="strategies/pipelines/timetable.py",
        old="return (Action(Kind.FORWARD, stage, number), *behind)",
        new="return (Action(Kind.FORWARD, stage, number),)",
        caught_by=(
            "tests/strategies/pipelines/test_pipeline_timetable.py::test_dependencies_are_the_neighbours_and_ones_own_forward_pass",
        ),
    ),
    Fault(
        name="a device begins before the last one that it has to wait for is done",
        path="strategies/pipelines/driver.py",
        old="for number in turn.needs:",
        new="for number in turn.needs[1:]:",
        caught_by=(
            "tests/strategies/pipelines/test_pipeline_driver.py::test_an_action_begins_when_all_is_done_that_it_depends_on",
        ),
    ),
    Fault(
        name="what a stage keeps is freed after the first part of its backward pass",
        path="strategies/pipelines/replica_run.py",
        old="kept = self._kept[number, micro_batch]",
        new="kept = self._kept.pop((number, micro_batch))",
        caught_by=(
            "tests/strategies/pipelines/test_pipeline_stages.py::test_gradients_are_those_of_the_whole_function",
        ),
    ),
    Fault(
        name="a value that several stages take is freed when the first has it",
        path="strategies/pipelines/replica_run.py",
        old="self._left[micro_batch, value] = self._takers[value]",
        new="self._left[micro_batch, value] = 1",
        caught_by=(
            "tests/strategies/pipelines/test_pipeline_stages.py::test_gradients_are_those_of_the_whole_function",
        ),
    ),
    Fault(
        name="the gradient of a stage is the one of its last micro-batch",
        path="strategies/pipelines/replica_run.py",
        old="sums = self.sums[number]\n        if sums is None:",
        new="sums = self.sums[number]\n        if micro_batch or sums is None:",
        caught_by=(
            "tests/strategies/pipelines/test_pipeline_stages.py::test_gradients_are_those_of_the_whole_function",
        ),
    ),
)
