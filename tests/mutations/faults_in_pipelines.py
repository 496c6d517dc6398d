"""Faults in the pipelines of `strategies`."""

from __future__ import annotations

from fault import Fault

_TESTS = "tests/strategies/pipelines"

IN_PIPELINES = (
    Fault(
        name="all devices of a pipeline recompute at once, on however few cores",
        path="strategies/pipelines/stage_gradients.py",
        old="    return threading.Semaphore(len(os.sched_getaffinity(0)))",
        new="    return nullcontext()",
        caught_by=(f"{_TESTS}/test_pipelining.py::test_no_more_devices_recompute_at_once_than_there_are_cores",),
    ),
    Fault(
        name="what depends on weights alone is kept of every micro-batch",
        path="strategies/pipelines/stages.py",
        old="again = _movements(graph) | self._lasting(graph)",
        new="again = _movements(graph)",
        caught_by=(f"{_TESTS}/test_pipeline_stages.py::test_weights_are_not_kept_nor_what_depends_on_them_alone",),
    ),
    Fault(
        name="the gradients of a stage go on from those of the last update",
        path="strategies/pipelines/stages.py",
        old="before = jnp.where(number == 0, jnp.zeros_like(sum_), sum_)",
        new="before = sum_",
        caught_by=(f"{_TESTS}/test_pipelining_ops.py::test_pl_20_interleaved_is_a_loop_on_the_host",),
    ),
    Fault(
        name="a stage shards over devices on which it is not",
        path="strategies/pipelines/marks.py",
        old="if device not in mapping[stage]:",
        new="if False:",
        caught_by=(f"{_TESTS}/test_pipeline_marks.py::test_shards_on_other_devices_than_the_stage_are_refused",),
    ),
    Fault(
        name="an optimizer gets parts of captured gradients",
        path="strategies/updates/sharded_update.py",
        old="if self._optimizer.needs_whole:",
        new="if False:",
        caught_by=(f"{_TESTS}/test_pipeline_captures.py::test_they_are_whole_where_the_optimizer_state_is_in_parts",),
    ),
)
