"""Pipelines of functions: each takes what the one before returns, on a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from strategies.feeds.infeed import InfeedQueue
from strategies.feeds.outfeed import OutfeedQueue
from strategies.gradients.accumulation import AccumulationDtype, GradientAccumulationReductionMethod
from strategies.gradients.outcome import Outcome
from strategies.ipu import IPUStrategy
from strategies.numbers import positive
from strategies.pipelines.counter import counting
from strategies.pipelines.inference import Inference
from strategies.pipelines.mapping import DeviceMapping, Stage, checked_count, places_of, schedule_for
from strategies.pipelines.marks import function_of_stage, pipeline_stage
from strategies.pipelines.optimizer_function import (
    OptimizerFunctionOutput,
    PipelineStageOptions,
    check_stage_options,
    check_update_options,
)
from strategies.pipelines.outfeed_rule import OutfeedRule
from strategies.pipelines.pipelining import Pipelining, RecomputationMode
from strategies.pipelines.schedules.registry import PipelineSchedule
from strategies.replicas.replica_context import replica_context
from strategies.replicas.replicas import Replicas
from strategies.roles import Variables
from strategies.step.metrics import Metrics
from strategies.strategy import Strategy, get_strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer

_OUTPUT = "pipeline_stage_output"

OptimizerFunction = Callable[..., OptimizerFunctionOutput]


class Pipeline:
    """Stages that are trained, or only run; `pipeline` makes one.

    Attributes:
        metrics: of the last update, with the mean "loss" over all replicas; None before the first one.
        strategy: where the replicas are.
    """

    def __init__(
        self,
        strategy: Strategy,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        infeed: InfeedQueue | None,
        outfeed: OutfeedRule,
        optimizer_function: OptimizerFunction | None,
        count: int,
        repeat_count: int,
        pipelining: Callable[[Callable[[Mapping[int, Sequence[Any]]], None] | None], Pipelining],
        options: Mapping[str, Any],
    ) -> None:
        self.strategy = strategy
        self.metrics: Metrics | None = None
        self._stages = stages
        self._inputs = inputs
        self._infeed = infeed
        self._outfeed = outfeed
        self._optimizer_function = optimizer_function
        self._count = count
        self._repeat_count = repeat_count
        self._options = options
        self._pipelining = pipelining(None if outfeed.queue is None else self._take)
        self._trainer: Trainer | None = None
        self._inference: Inference | None = None
        self._made: Mapping[int, Sequence[Any]] = {}
        self._number = 0

    def init(self, variables: Variables) -> TrainState:
        """The first state, with instance 0's variables on every instance; a collective call where there are several.

        Raises:
            ValueError: if the last stage has outputs and there is no outfeed; and see `Trainer`.
        """
        output, outputs = self._described(variables)
        if output is None:
            self._outfeed.check_outputs(outputs if isinstance(outputs, list | tuple) else [outputs])
            return TrainState(self.strategy.broadcast(variables), None, 0)
        self._outfeed.check_outputs(outputs)
        self._trainer = Trainer(
            self.strategy,
            self._loss,
            output.opt,
            pipeline=self._pipelining,
            gradient_accumulation_count=self._count,
            trainable=output.variables,
            **self._options,
        )
        return self._trainer.init(variables)

    def __call__(self, state: TrainState) -> TrainState:
        """Run all micro-batches `repeat_count` times, with an update behind each time; the state is used up.

        Args:
            state: what `init` or this has returned last.

        Raises:
            RuntimeError: before `init`.
            EndOfDataError: if the infeed has too few elements.
        """
        if self._optimizer_function is not None and self._trainer is None:
            raise RuntimeError("a pipeline was called before init; begin with state = net.init(variables)")
        for _ in range(self._repeat_count):
            elements = self._elements()
            if self._trainer is None:
                self._made = self._inferred(state.variables, elements)
            else:
                state, self.metrics = self._trainer.step(state, self._batch(elements))
            self._enqueue()
        return state

    # ---- what is computed

    def _run(self, variables: Variables, leaves: Sequence[Any]) -> Any:
        """What the last stage returns for an element."""
        values = list(self._inputs)
        named: Mapping[str, Any] = {}
        if self._infeed is not None:
            given, named = self._infeed.spec.arguments(leaves)
            values += given
        result: Any = None
        for number, stage in enumerate(self._stages):
            if callable(stage):
                with pipeline_stage(number):
                    result = _made_here(stage(variables, *values, **named))
            else:
                result = []
                for place, function in enumerate(stage):
                    with function_of_stage(number, place):
                        result += _listed(_made_here(function(variables, *values, **named)))
            values, named = _listed(result), {}
        return result

    def _learned(self, variables: Variables, leaves: Sequence[Any]) -> tuple[OptimizerFunctionOutput, list[Any]]:
        outputs = _listed(self._run(variables, leaves))
        assert self._optimizer_function is not None
        with pipeline_stage(len(self._stages) - 1):
            found = self._optimizer_function(*outputs)
        if not isinstance(found, OptimizerFunctionOutput):
            raise TypeError(
                f"the optimizer_function returns {found!r}, a {type(found).__name__}; it must return an "
                "OptimizerFunctionOutput"
            )
        return found, outputs

    def _loss(self, variables: Variables, batch: Sequence[Any], key: jax.Array) -> Outcome:
        output, outputs = self._learned(variables, [leaf[0] for leaf in batch[1:]])
        return Outcome(output.loss, outputs=self._outfeed.chosen(outputs, output.loss))

    def _described(self, variables: Variables) -> tuple[OptimizerFunctionOutput | None, Any]:
        """What the optimizer function returns, and the shapes of what the last stage does."""
        found: list[OptimizerFunctionOutput] = []
        replicas = self.strategy.replicas

        def traced(variables: Variables, leaves: Sequence[Any], number: jax.Array, index: jax.Array) -> Any:
            with replica_context(replicas.new_context(index, "shapes")), counting(number):
                if self._optimizer_function is None:
                    return jax.tree.map(jnp.asarray, self._run(variables, leaves))
                output, outputs = self._learned(variables, leaves)
                found.append(output)
                return jax.tree.map(jnp.asarray, outputs)

        shapes = jax.eval_shape(traced, variables, self._spec, np.int32(0), np.int32(0))
        return (found[0] if found else None), shapes

    @property
    def _spec(self) -> list[jax.ShapeDtypeStruct]:
        return [] if self._infeed is None else list(self._infeed.spec.leaves)

    # ---- what comes in and goes out

    def _elements(self) -> list[list[list[np.ndarray]]]:
        """For each local replica and micro-batch the arrays of its element."""
        replication = self.strategy.replicas.reducer.replication
        if self._infeed is None:
            return [[[] for _ in range(self._count)] for _ in replication.local]
        return self._infeed.take(replication, self._count)

    def _batch(self, elements: Sequence[Sequence[Sequence[np.ndarray]]]) -> list[np.ndarray]:
        """All of them one after another; the first array is there for pipelines without an infeed."""
        every = [element for own in elements for element in own]
        return [np.zeros(len(every), np.int32), *(np.stack(leaves) for leaves in zip(*every, strict=True))]

    def _inferred(self, variables: Variables, elements: Sequence[Any]) -> Mapping[int, Sequence[Any]]:
        replicas: Replicas = self.strategy.replicas
        if self._inference is None:
            timetable = self._pipelining.timetable(replicas.grid.ipus_per_replica, self._count, training=False)
            widths = self._pipelining.widths(timetable)
            self._inference = Inference(replicas, self._run, variables, self._spec, timetable, widths)
        return self._inference(variables, elements)

    def _take(self, outputs: Mapping[int, Sequence[Any]]) -> None:
        self._made = outputs

    def _enqueue(self) -> None:
        queue = self._outfeed.queue
        of_each = list(self._made.values())
        if queue is None or not jax.tree.leaves(of_each):
            return
        replication = self.strategy.replicas.reducer.replication
        rounds = (
            [[self._outfeed.summed(own) for own in of_each]]
            if self._outfeed.accumulates
            else zip(*of_each, strict=True)
        )
        for values in rounds:
            queue.put(replication, self._number, values)
            self._number += 1


def _made_here(result: Any) -> Any:
    """What a stage returns, of which each array is made by an equation of the stage, even if it is an input."""
    return jax.tree.map(lambda leaf: checkpoint_name(jnp.asarray(leaf), _OUTPUT), result)


def _listed(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]


def pipeline(
    computational_stages: Sequence[Stage],
    gradient_accumulation_count: Any = None,
    gradient_accumulation_dtype: AccumulationDtype = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Any = None,
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
    accumulate_outfeed_dtype: Any = None,
    outfeed_mask: Sequence[bool] | None = None,
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
    name: str | None = None,
) -> Pipeline:
    """A pipeline of functions; it learns if there is an optimizer function, and is only run otherwise.

    A stage is `stage(variables, *inputs)`: of all variables it uses some, which lie on its device. The first one gets
    `inputs` and an element of the infeed (a dictionary as keyword arguments), each of the others what the one before
    returns. A stage that is a list of functions runs them at the same time, all with the same arguments; what they
    return comes one after another. The replicas are those of the strategy in whose scope this is called, or one.

    Semantics: the original's `pipelining_ops.pipeline`.

    Args:
        computational_stages: at least two.
        gradient_accumulation_count: micro-batches of an update, or of a run.
        gradient_accumulation_dtype: see `StepOptions`.
        gradient_accumulation_for_captured_grads: accepted for programs of the original.
        repeat_count: updates of a call.
        batch_serialization_iterations: each stage takes so many micro-batches one after another.
        inputs: constants, the first arguments of the first stage.
        infeed_queue: where elements come from, one for each micro-batch.
        outfeed_queue: where outputs of the last stage go.
        optimizer_function: `(*outputs) -> OptimizerFunctionOutput`.
        device_mapping: the device of each stage, a list for a stage that is a list, -1 for all devices.
        pipeline_schedule: Grouped unless it says otherwise.
        recomputation_mode: None keeps what backward passes need.
        forward_propagation_stages_poplar_options: checked only.
        backward_propagation_stages_poplar_options: checked only.
        weight_update_poplar_options: checked only.
        offload_weight_update_variables: see `offload_optimizer_state` of `StepOptions`.
        replicated_optimizer_state_sharding: see `StepOptions`.
        offload_activations: keep what backward passes need in host memory.
        offload_gradient_accumulation_buffers: keep accumulators there while nothing is added to them.
        replicated_weight_sharding: accepted for programs of the original.
        offload_weights: accepted for programs of the original.
        continuous_weight_updates: not supported, as in the original.
        outfeed_loss: the outfeed gets the loss instead of the outputs.
        accumulate_outfeed: it gets the sum over the micro-batches of an update.
        accumulate_outfeed_dtype: of that sum.
        outfeed_mask: for each output whether it is left out.
        reduction_method: how gradients of micro-batches become one; over replicas it is always the mean.
        name: accepted for programs of the original.

    Raises:
        TypeError: for a mapping, schedule, mode or queue of a wrong type.
        ValueError: for fewer than two stages, a mapping that does not fit, or arguments that exclude each other.
        FailedPreconditionError: if the schedule does not take so many micro-batches.
        NotImplementedError: for what the original has not either; the message says what to do instead.
    """
    if continuous_weight_updates:
        raise NotImplementedError("continuous_weight_updates is not supported, as in the original; leave it out")
    learns = optimizer_function is not None
    if not isinstance(infeed_queue, InfeedQueue | None):
        raise TypeError(f"infeed_queue is {infeed_queue!r}, a {type(infeed_queue).__name__}; use an InfeedQueue")
    if learns and not callable(optimizer_function):
        raise TypeError(
            f"optimizer_function is {optimizer_function!r}, a {type(optimizer_function).__name__}; use a function"
        )
    outfeed = OutfeedRule(outfeed_queue, outfeed_loss, outfeed_mask, accumulate_outfeed, accumulate_outfeed_dtype)
    outfeed.check(learns)
    schedule = schedule_for(pipeline_schedule, batch_serialization_iterations)
    strategy = get_strategy()
    devices = _devices_of(device_mapping, len(computational_stages))
    ipus_per_replica = devices if strategy is None else strategy.replicas.grid.ipus_per_replica
    places = places_of(computational_stages, device_mapping, ipus_per_replica, batch_serialization_iterations)
    _refuse_captures(computational_stages)
    _refuse_lists_at_the_end(computational_stages, learns)
    count = checked_count(_whole(gradient_accumulation_count), schedule, places, learns)
    method = GradientAccumulationReductionMethod.parse(reduction_method)
    if batch_serialization_iterations > 1 and method is not GradientAccumulationReductionMethod.SUM:
        raise ValueError(
            f"batch_serialization_iterations is {batch_serialization_iterations}, and reduction_method {method.name}; "
            "batch serialization adds gradients up: use SUM"
        )
    if replicated_optimizer_state_sharding and offload_weight_update_variables is False:
        raise ValueError(
            "replicated_optimizer_state_sharding is True, and offload_weight_update_variables False; optimizer state "
            "must be offloaded to be sharded: leave offload_weight_update_variables out"
        )
    check_stage_options(
        "forward_propagation_stages_poplar_options", forward_propagation_stages_poplar_options, len(places)
    )
    check_stage_options(
        "backward_propagation_stages_poplar_options", backward_propagation_stages_poplar_options, len(places)
    )
    check_update_options("weight_update_poplar_options", weight_update_poplar_options)
    mapping = device_mapping if device_mapping is not None else [own[0] for own in places]

    def pipelining(take: Any) -> Pipelining:
        return Pipelining(
            device_mapping=mapping,
            schedule=pipeline_schedule,
            recompute=recomputation_mode is not None,
            batch_serialization_iterations=batch_serialization_iterations,
            recomputation_mode=recomputation_mode,
            offload_activations=bool(offload_activations),
            offload_gradient_accumulation_buffers=bool(offload_gradient_accumulation_buffers),
            take_outputs=take,
        )

    pipelining(None).timetable(ipus_per_replica, count, learns)  # which may refuse the mapping
    return Pipeline(
        strategy or IPUStrategy(1, devices),
        computational_stages,
        [jnp.asarray(one) for one in _listed(inputs)],
        infeed_queue,
        outfeed,
        optimizer_function,
        count,
        positive("repeat_count", repeat_count),
        pipelining,
        {
            "gradient_accumulation_dtype": gradient_accumulation_dtype,
            "reduction_method": method,
            "replicated_optimizer_state_sharding": replicated_optimizer_state_sharding,
            "offload_optimizer_state": offload_weight_update_variables,
        },
    )


def _devices_of(mapping: Any, stages: int) -> int:
    """How many devices a replica spans that nobody else has decided."""
    numbers = [one for one in jax.tree.leaves(mapping) if isinstance(one, int)]
    return 1 + max([*numbers, 0]) if isinstance(mapping, Sequence) else max(stages, 1)


def _whole(count: Any) -> Any:
    """A count that may be an array."""
    return int(count) if isinstance(count, np.ndarray | jax.Array) and not count.ndim else count


def _refuse_captures(stages: Sequence[Stage]) -> None:
    for stage in stages:
        for function in [stage] if callable(stage) else stage:
            cells = [_contents(cell) for cell in getattr(function, "__closure__", None) or ()]
            for value in jax.tree.leaves(cells):
                if isinstance(value, jax.core.Tracer):
                    raise ValueError(
                        f"Trying to capture the tensor {value.aval} in a stage, which another program computes; hand "
                        "it over in inputs"
                    )


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _refuse_lists_at_the_end(stages: Sequence[Stage], learns: bool) -> None:
    if learns and not callable(stages[-1]):
        raise ValueError(
            "the last stage is a list of functions, and the optimizer_function needs what all of them return; add a "
            "stage behind it that is one function"
        )
