"""Faults that let a pipeline compute something else than its stages in sequence."""

from __future__ import annotations

from fault import Fault

IN_PIPELINES = (
    Fault(
        name="a schedule may omit a backward pass",
        path="strategies/pipelines/timetable.py",
        old="if missing := expected - seen:",
        new="if missing := {each for each in expected - seen if each.kind is ActionKind.FORWARD}:",
        caught_by="tests/strategies/pipelines/test_pipeline_timetable.py::test_impossible_lists_are_refused",
    ),
    Fault(
        name="a schedule may add the gradients of a stage in another order",
        path="strategies/pipelines/timetable.py",
        old="if action.micro_batch < before:",
        new="if False:",
        caught_by="tests/strategies/pipelines/test_pipeline_timetable.py::test_micro_batches_do_not_overtake_each_other",
    ),
    Fault(
        name="a backward pass does not wait for the next stage's",
        path="strategies/pipelines/timetable.py",
        old="return (StageAction(ActionKind.FORWARD, stage, number), *behind)",
        new="return (StageAction(ActionKind.FORWARD, stage, number),)",
        caught_by="tests/strategies/pipelines/test_pipeline_timetable.py::test_dependencies_are_the_neighbours_and_the_own_forward_pass",
    ),
    Fault(
        name="a device begins before its last prerequisite is done",
        path="strategies/pipelines/running/driver.py",
        old="if self._needs[scheduled.number]:",
        new="if self._needs[scheduled.number] > 1:",
        caught_by="tests/strategies/pipelines/test_pipeline_driver.py::test_an_action_begins_after_all_its_dependencies",
    ),
    Fault(
        name="micro-batches of PyTorch that run at the same time draw from one generator",
        path="strategies/torch/pipelines.py",
        old="        return drawing_in_thread(seed)\n",
        new="        return nullcontext()\n",
        caught_by="tests/strategies/on_torch/test_torch_pipelines.py::test_random_numbers_and_moving_means_match_a_model_without_a_pipeline",
    ),
    Fault(
        name="a stage's kept values are freed after the first part of its backward pass",
        path="strategies/pipelines/running/stage_programs.py",
        old="kept = self._kept[number, micro_batch]",
        new="kept = self._kept.pop((number, micro_batch))",
        caught_by="tests/strategies/pipelines/test_pipeline_stages.py::test_gradients_are_those_of_the_whole_function",
    ),
    Fault(
        name="a value taken by several stages is freed after the first",
        path="strategies/pipelines/running/stage_programs.py",
        old="self._left[micro_batch, value] = self._takers[value]",
        new="self._left[micro_batch, value] = 1",
        caught_by="tests/strategies/pipelines/test_pipeline_stages.py::test_gradients_are_those_of_the_whole_function",
    ),
    Fault(
        name="the gradient of a stage contains only its last micro-batch",
        path="strategies/pipelines/running/stage_programs.py",
        old="sums = self.sums[number]\n        if sums is None:",
        new="sums = self.sums[number]\n        if micro_batch or sums is None:",
        caught_by="tests/strategies/pipelines/test_pipeline_stages.py::test_gradients_are_those_of_the_whole_function",
    ),
    Fault(
        name="more devices of a pipeline recompute at once than there are cores",
        path="strategies/pipelines/running/stage_gradients.py",
        old="    return threading.Semaphore(len(os.sched_getaffinity(0)))",
        new="    return nullcontext()",
        caught_by="tests/strategies/pipelines/test_pipelining.py::test_at_most_as_many_devices_as_cores_recompute_concurrently",
    ),
    Fault(
        name="values that depend only on weights are kept for every micro-batch",
        path="strategies/pipelines/running/stage_programs.py",
        old="again = movements | self._lasting(graph)",
        new="again = movements",
        caught_by="tests/strategies/pipelines/test_pipeline_stages.py::test_weights_and_values_computed_from_weights_alone_are_not_kept",
    ),
    Fault(
        name="the gradients of a stage include the previous update's",
        path="strategies/pipelines/running/stage_programs.py",
        old="before = jnp.where(number == 0, jnp.zeros_like(sum_), sum_)",
        new="before = sum_",
        caught_by="tests/strategies/pipelines/test_pipelining_ops.py::test_the_interleaved_schedule_matches_a_loop_on_the_host",
    ),
    Fault(
        name="a stage may shard over other devices than its own",
        path="strategies/pipelines/stages.py",
        old="if device not in mapping[stage]:",
        new="if False:",
        caught_by="tests/strategies/pipelines/test_pipeline_marks.py::test_shards_on_other_devices_than_the_stage_are_refused",
    ),
    Fault(
        name="an optimizer gets parts of captured gradients",
        path="strategies/jax/updates/update.py",
        old="if self._optimizer.needs_whole:",
        new="if False:",
        caught_by="tests/strategies/pipelines/test_pipeline_captures.py::test_captured_gradients_are_whole_if_the_optimizer_state_is_sharded",
    ),
    Fault(
        name="a penalty is computed by the stage that adds it, not by the stage of its weights",
        path="strategies/pipelines/stages.py",
        old="if before or _is_penalty(equation, own, needed):",
        new="if before:",
        caught_by="tests/strategies/pipelines/test_pipeline_penalties.py::test_a_penalty_is_computed_by_the_stage_that_has_the_weight",
    ),
    Fault(
        name="a gap in a device mapping is refused beside a stage on all devices",
        path="strategies/pipelines/stages.py",
        old="if gaps and _ALL_DEVICES not in numbers:",
        new="if gaps:",
        caught_by="tests/strategies/pipelines/test_pipeline_mapping.py::test_a_stage_on_all_devices_leaves_none_without_work",
    ),
    Fault(
        name="offloaded accumulators stay on their device",
        path="strategies/pipelines/running/stage_programs.py",
        old="self.sums[number] = on_host(sums, device) if self._keeping.offloads_sums else sums",
        new="self.sums[number] = sums",
        caught_by="tests/strategies/pipelines/test_pipeline_stages.py::test_offloaded_accumulators_lie_in_host_memory_between_additions",
    ),
    Fault(
        name="offloading copies weights, once for each micro-batch",
        path="strategies/pipelines/running/stage_programs.py",
        old="[value if place in stays else on_host(value, device)",
        new="[on_host(value, device)",
        caught_by="tests/strategies/pipelines/test_pipeline_stages.py::test_weights_stay_in_place_when_activations_are_offloaded",
    ),
)
