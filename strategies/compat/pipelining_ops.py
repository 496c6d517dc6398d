"""Pipelines of functions: the stages of a program on several devices of a replica, their plans and their traces.

Semantics: the original's `pipelining_ops`. `plan`, traces, and schedules beyond the first three are additions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import positive, wrong_type
from strategies.compat.functions.network import Learning, OptimizerFunction, Pipeline
from strategies.compat.functions.optimizer_function import (
    OptimizerFunctionOutput,
    PipelineStageOptions,
    check_stage_options,
    check_update_options,
)
from strategies.compat.functions.outfeed_rule import OutfeedRule
from strategies.compat.functions.stage_functions import StageFunctions, listed, tracers_in
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.defaults import current_defaults
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.feeds.outfeed import OutfeedQueue
from strategies.jax.programs.recomputation import recomputation_checkpoint
from strategies.local_strategy import LocalStrategy
from strategies.pipelines.mapping import _ALL_DEVICES as _ALL_DEVICES
from strategies.pipelines.mapping import (
    DeviceMapping,
    Stage,
    checked_count,
    num_devices,
    places_of,
    schedule_for,
)
from strategies.pipelines.pipelining import Pipelining, RecomputationMode
from strategies.pipelines.plan import Plan, plan
from strategies.pipelines.running.micro_batch import (
    get_current_iteration_counter,
    get_model_state,
    get_random_key,
    update_model_state,
)
from strategies.pipelines.schedules import PipelineSchedule
from strategies.pipelines.times import StageTimes
from strategies.pipelines.trace import Trace
from strategies.strategy import get_strategy
from strategies.typing import AccumulationDtype, Number, Tree

__all__ = [
    "OptimizerFunctionOutput",
    "Pipeline",
    "PipelineSchedule",
    "PipelineStageOptions",
    "Plan",
    "RecomputationMode",
    "StageTimes",
    "Trace",
    "get_current_iteration_counter",
    "get_model_state",
    "get_random_key",
    "pipeline",
    "plan",
    "recomputation_checkpoint",
    "update_model_state",
]

logger = logging.getLogger(__name__)


def pipeline(
    computational_stages: Sequence[Stage],
    gradient_accumulation_count: Number = None,
    gradient_accumulation_dtype: AccumulationDtype = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Tree = None,
    infeed_queue: InfeedQueue | None = None,
    outfeed_queue: OutfeedQueue | None = None,
    optimizer_function: OptimizerFunction | None = None,
    device_mapping: DeviceMapping | None = None,
    pipeline_schedule: PipelineSchedule | str | None = None,
    recomputation_mode: RecomputationMode | None = None,
    forward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    backward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    weight_update_poplar_options: PipelineStageOptions | None = None,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool | None = False,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    replicated_weight_sharding: bool | None = None,
    offload_weights: bool | None = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: AccumulationDtype = None,
    outfeed_mask: Sequence[bool] | None = None,
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
) -> Pipeline:
    """Make a pipeline of functions, which trains if it has an optimizer function and otherwise runs forward only.

    A stage is `stage(variables, *inputs)`. Every stage receives all variables; those that it uses lie on its device.
    The first stage receives `inputs` and an element of the infeed (a dictionary as keyword arguments), each later stage
    the outputs of the stage before. If a stage is a list of functions, they run at the same time with the same
    arguments, and their outputs are joined in order. The replicas are those of the enclosing strategy's scope, or one.

    Semantics: the original's `pipelining_ops.pipeline`.

    Args:
        computational_stages: At least two stages.
        gradient_accumulation_count: Number of micro-batches of an update, or of a run without an optimizer.
        gradient_accumulation_dtype: Dtype of gradient accumulators, as in `StepOptions`.
        gradient_accumulation_for_captured_grads: False gives the optimizer the captured gradients of each micro-batch.
        repeat_count: Number of updates of a call.
        batch_serialization_iterations: Number of micro-batches that each stage processes one after another.
        inputs: Constants, the first arguments of the first stage.
        infeed_queue: Source of the elements, one for each micro-batch.
        outfeed_queue: Destination of the last stage's outputs.
        optimizer_function: `(*outputs) -> OptimizerFunctionOutput`.
        device_mapping: Device of each stage; a list for a stage that is a list; -1 for all devices.
        pipeline_schedule: Schedule of the stages; Grouped by default.
        recomputation_mode: Way of recomputing activations; None keeps them for the backward passes. If a configuration
            is in force (`strategies.config`), its `allow_recompute` decides whether to recompute.
        forward_propagation_stages_poplar_options: Options that are checked and have no effect.
        backward_propagation_stages_poplar_options: Options that are checked and have no effect.
        weight_update_poplar_options: Options that are checked and have no effect.
        offload_weight_update_variables: Whether to offload optimizer state, as `offload_optimizer_state` of
            `StepOptions`.
        replicated_optimizer_state_sharding: Whether to shard optimizer state over replicas, as in `StepOptions`.
        offload_activations: Whether to keep activations for backward passes in host memory.
        offload_gradient_accumulation_buffers: Whether to keep accumulators in host memory between additions.
        replicated_weight_sharding: Accepted for programs of the original; no effect.
        offload_weights: Accepted for programs of the original; no effect.
        continuous_weight_updates: Not supported, as in the original.
        outfeed_loss: Whether the outfeed gets the loss instead of the outputs.
        accumulate_outfeed: Whether the outfeed gets the sum over the micro-batches of an update.
        accumulate_outfeed_dtype: Dtype of that sum.
        outfeed_mask: For each output, whether to leave it out.
        reduction_method: Reduction of gradients over micro-batches; over replicas it is always the mean.
        name: Accepted for programs of the original; no effect.

    Raises:
        TypeError: If a mapping, schedule, mode, queue or switch has a wrong type.
        ValueError: For fewer than two stages, a mapping that does not fit, or arguments that exclude each other.
        FailedPreconditionError: If the schedule does not allow this number of micro-batches.
        NotImplementedError: For features that the original lacks too; the message names an alternative.
    """
    require_switches(
        gradient_accumulation_for_captured_grads=gradient_accumulation_for_captured_grads,
        continuous_weight_updates=continuous_weight_updates,
        outfeed_loss=outfeed_loss,
        accumulate_outfeed=accumulate_outfeed,
    )
    require_switches_or_none(
        offload_weight_update_variables=offload_weight_update_variables,
        replicated_optimizer_state_sharding=replicated_optimizer_state_sharding,
        offload_activations=offload_activations,
        offload_gradient_accumulation_buffers=offload_gradient_accumulation_buffers,
        replicated_weight_sharding=replicated_weight_sharding,
        offload_weights=offload_weights,
    )
    if continuous_weight_updates:
        raise NotImplementedError("continuous_weight_updates is not supported, as in the original; leave it out")
    learns = optimizer_function is not None
    _check_types(infeed_queue, optimizer_function, recomputation_mode)
    outfeed = OutfeedRule(outfeed_queue, outfeed_loss, outfeed_mask, accumulate_outfeed, accumulate_outfeed_dtype)
    outfeed.check(learns)
    schedule = schedule_for(pipeline_schedule, batch_serialization_iterations)
    strategy = get_strategy()
    number = len(computational_stages) if isinstance(computational_stages, Sequence) else 1
    devices = num_devices(device_mapping, number)
    ipus_per_replica = devices if strategy is None else strategy.replicas.grid.ipus_per_replica
    places = places_of(computational_stages, device_mapping, ipus_per_replica, batch_serialization_iterations)
    _refuse_captures(computational_stages)
    _refuse_lists_at_the_end(computational_stages, learns)
    count = checked_count(_whole(gradient_accumulation_count), schedule, places, learns)
    method = GradientAccumulationReductionMethod.parse(reduction_method)
    _refuse_means_with_serialization(method, batch_serialization_iterations)
    _refuse_sharding_without_offloading(replicated_optimizer_state_sharding, offload_weight_update_variables)
    for name, stage_options in (
        ("forward_propagation_stages_poplar_options", forward_propagation_stages_poplar_options),
        ("backward_propagation_stages_poplar_options", backward_propagation_stages_poplar_options),
    ):
        check_stage_options(name, stage_options, len(places))
    check_update_options("weight_update_poplar_options", weight_update_poplar_options)
    pipelining = Pipelining(
        device_mapping=device_mapping if device_mapping is not None else [own[0] for own in places],
        schedule=pipeline_schedule,
        recompute=_recomputes(recomputation_mode),
        batch_serialization_iterations=batch_serialization_iterations,
        recomputation_mode=recomputation_mode,
        offload_activations=bool(offload_activations),
        offload_gradient_accumulation_buffers=bool(offload_gradient_accumulation_buffers),
        allow_idle_devices=True,
    )
    pipelining.timetable(ipus_per_replica, count, learns)  # may refuse the mapping
    options = {
        "gradient_accumulation_dtype": gradient_accumulation_dtype,
        "reduction_method": method,
        "replicated_optimizer_state_sharding": replicated_optimizer_state_sharding,
        "offload_optimizer_state": offload_weight_update_variables,
    }
    is_sum = method is GradientAccumulationReductionMethod.SUM
    learning = None
    if optimizer_function is not None:
        learning = Learning(optimizer_function, options, gradient_accumulation_for_captured_grads, is_sum)
    return Pipeline(
        strategy or LocalStrategy(ipus_per_replica=devices),
        StageFunctions(computational_stages, [jnp.asarray(one) for one in listed(inputs)], infeed_queue),
        outfeed,
        learning,
        count,
        positive("repeat_count", repeat_count),
        pipelining,
    )


def _recomputes(mode: RecomputationMode | None) -> bool:
    """Return whether stages recompute: as configured, or else if a recomputation mode is given."""
    allowed = current_defaults().recomputes
    if allowed is False and mode is not None:
        logger.warning(
            "recomputation_mode is %s, but the configuration in force has allow_recompute False: nothing is recomputed",
            mode.name,
        )
    return mode is not None if allowed is None else allowed


def _check_types(infeed_queue: object, optimizer_function: object, recomputation_mode: object) -> None:
    if not isinstance(infeed_queue, InfeedQueue | None):
        raise wrong_type("infeed_queue", infeed_queue, "use an InfeedQueue")
    if optimizer_function is not None and not callable(optimizer_function):
        raise wrong_type("optimizer_function", optimizer_function, "use a function")
    if not isinstance(recomputation_mode, RecomputationMode | None):
        raise TypeError(f"recomputation_mode is {recomputation_mode!r}; use a member of RecomputationMode")


def _refuse_means_with_serialization(method: GradientAccumulationReductionMethod, iterations: int) -> None:
    if iterations > 1 and method is not GradientAccumulationReductionMethod.SUM:
        raise ValueError(
            f"batch_serialization_iterations is {iterations}, and reduction_method is {method.name}; batch "
            "serialization adds gradients up: use SUM"
        )


def _refuse_sharding_without_offloading(shards: bool | None, offloads: bool | None) -> None:
    if shards and offloads is False:
        raise ValueError(
            "replicated_optimizer_state_sharding is True, and offload_weight_update_variables is False; only offloaded "
            "optimizer state can be sharded: leave offload_weight_update_variables out"
        )


def _whole(count: Number) -> Number:
    """Convert a count that may be an integer array without dimensions."""
    is_array = isinstance(count, np.ndarray | jax.Array) and not count.ndim
    return int(count) if is_array and jnp.issubdtype(count.dtype, jnp.integer) else count


def _refuse_captures(stages: Sequence[Stage]) -> None:
    tracer = next(tracers_in(list(stages)), None)
    if tracer is not None:
        raise ValueError(
            f"Trying to capture the tensor {tracer.aval} in a stage, but another program computes it; pass it in inputs"
        )


def _refuse_lists_at_the_end(stages: Sequence[Stage], learns: bool) -> None:
    if learns and not callable(stages[-1]):
        raise ValueError(
            "the last stage is a list of functions, and the optimizer_function needs the outputs of all of them; "
            "add a stage after it that is one function"
        )
