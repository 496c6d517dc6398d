"""A pipeline of functions: each stage has its own device and takes the outputs of the stage before."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import check_optional, positive, wrong_type
from strategies.compat.functions.optimizer_function import Captures, OptimizerFunctionOutput, PipelineStageOptions
from strategies.compat.functions.stages import OutfeedRule, StageFunctions, listed, tracers_in
from strategies.core.metrics import Metrics
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.data.layout import Replication
from strategies.defaults import current_defaults
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.feeds.outfeed import OutfeedQueue
from strategies.jax.programs.captures import CapturedValues
from strategies.jax.programs.compilation import shapes_of
from strategies.jax.programs.jaxpr import Graph
from strategies.jax.programs.recomputation import shapes_by_tag
from strategies.jax.replicas.devices import DeviceGrid
from strategies.jax.replicas.reduction_ops import check_outside_replica
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.updates.optimizers import unwrapped
from strategies.job_strategies import LocalStrategy
from strategies.pipelines.pipelining import (
    Pipelining,
    RecomputationMode,
    check_nothing_captured,
    check_stages_independent,
)
from strategies.pipelines.plan import Trace
from strategies.pipelines.running.arguments import MicroBatch, get_current_iteration_counter, tracing
from strategies.pipelines.running.driver import ScheduleGraph, ScheduleRunner, begin_devices, raise_first
from strategies.pipelines.running.stage_programs import (
    Accumulators,
    Executables,
    MicroBatchOutputs,
    ReplicaStages,
    StageArray,
    Staged,
    StagePrograms,
    StepArguments,
)
from strategies.pipelines.stages import (
    DeviceMapping,
    Stage,
    check_shard_marks,
    cut_in_stages,
    num_devices,
    pipeline_stage,
    places_of,
)
from strategies.pipelines.timetable import PipelineSchedule, Timed, Timetable
from strategies.strategy import get_strategy
from strategies.trainer import Trainer
from strategies.typing import AccumulationDtype, Batch, Number, Tree, Variables
from strategies.values import Outcome, TrainState

logger = logging.getLogger("strategies.compat.pipelining_ops")

OptimizerFunction = Callable[..., OptimizerFunctionOutput]
_Elements = Sequence[Sequence[Sequence[np.ndarray]]]
"""Arrays of the elements, by local replica and micro-batch."""


@dataclass(eq=False, repr=False)
class Pipeline:
    """A pipeline of functions, which trains if it has an optimizer function and otherwise runs forward only.

    A stage is `stage(variables, *inputs)`. Every stage receives all variables; those that it uses lie on its device.
    The first stage receives `inputs` and an element of the infeed (a dictionary as keyword arguments), each later stage
    the outputs of the stage before. If a stage is a list of functions, they run at the same time with the same
    arguments, and their outputs are joined in order. The replicas are those of the enclosing strategy's scope, or one.

    Semantics: the original's `pipelining_ops.pipeline`.

    Attributes:
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
        metrics: Metrics of the last update, with the mean "loss" over all replicas; None before the first update.
        trace: Timed work of the local replicas' devices in the last update or run; None before the first.
        strategy: Strategy whose replicas run the stages.
        options: Options of the trainer of the stages.

    Raises:
        TypeError: If a mapping, schedule, mode, queue or switch has a wrong type.
        ValueError: For fewer than two stages, a mapping that does not fit, or arguments that exclude each other.
        FailedPreconditionError: If the schedule does not allow this number of micro-batches.
        NotImplementedError: For features that the original lacks too; the message names an alternative.
    """

    computational_stages: Sequence[Stage]
    gradient_accumulation_count: Number = None
    gradient_accumulation_dtype: AccumulationDtype = None
    gradient_accumulation_for_captured_grads: bool = True
    repeat_count: int = 1
    batch_serialization_iterations: int = 1
    inputs: Tree = None
    infeed_queue: InfeedQueue | None = None
    outfeed_queue: OutfeedQueue | None = None
    optimizer_function: OptimizerFunction | None = None
    device_mapping: DeviceMapping | None = None
    pipeline_schedule: PipelineSchedule | str | None = None
    recomputation_mode: RecomputationMode | None = None
    forward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None
    backward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None
    weight_update_poplar_options: PipelineStageOptions | None = None
    offload_weight_update_variables: bool | None = None
    replicated_optimizer_state_sharding: bool | None = False
    offload_activations: bool | None = None
    offload_gradient_accumulation_buffers: bool | None = None
    replicated_weight_sharding: bool | None = None
    offload_weights: bool | None = None
    continuous_weight_updates: bool = False
    outfeed_loss: bool = False
    accumulate_outfeed: bool = False
    accumulate_outfeed_dtype: AccumulationDtype = None
    outfeed_mask: Sequence[bool] | None = None
    reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM
    name: str | None = None

    def __post_init__(self) -> None:
        self.metrics: Metrics | None = None
        self.trace: Trace | None = None
        self._trainer: Trainer | None = None
        self._output: OptimizerFunctionOutput | None = None
        self._captures = Captures()
        self._inference: _Inference | None = None
        self._made: Mapping[int, Sequence[Tree]] = {}
        self._numbers = itertools.count()  # of the values that outfeeds get
        self._reads: CapturedValues | None = None  # values that the stages read when they were traced
        self._check_switches()
        learns = self.optimizer_function is not None
        check_optional("infeed_queue", self.infeed_queue, InfeedQueue)
        if learns and not callable(self.optimizer_function):
            raise wrong_type("optimizer_function", self.optimizer_function, "use a function")
        of_sum = self.accumulate_outfeed, self.accumulate_outfeed_dtype
        self._outfeed = OutfeedRule(self.outfeed_queue, self.outfeed_loss, self.outfeed_mask, *of_sum)
        self._outfeed.check(learns)
        stages, mapping = self.computational_stages, self.device_mapping
        devices = num_devices(mapping, len(stages) if isinstance(stages, Sequence) else 1)
        strategy = get_strategy()
        ipus_per_replica = devices if strategy is None else strategy.replicas.grid.ipus_per_replica
        places = places_of(stages, mapping, ipus_per_replica, self.batch_serialization_iterations)
        _check_functions(stages, learns)
        self._check_stage_options()
        default = [own[0] if callable(stage) else own for stage, own in zip(stages, places, strict=True)]
        pipelining = self._pipelining(default if mapping is None else mapping)
        self._timetable = pipelining.timetable(ipus_per_replica, _whole(self.gradient_accumulation_count), learns)
        self.strategy = strategy or LocalStrategy(ipus_per_replica=devices)
        self._functions = StageFunctions(stages, [jnp.asarray(one) for one in listed(self.inputs)], self.infeed_queue)
        positive("repeat_count", self.repeat_count)
        self.options: Mapping[str, Any] = {
            "pipeline": pipelining,
            "gradient_accumulation_count": self._timetable.num_micro_batches,
            "gradient_accumulation_dtype": self.gradient_accumulation_dtype,
            "reduction_method": self._method(),
            "replicated_optimizer_state_sharding": self.replicated_optimizer_state_sharding,
            "offload_optimizer_state": self.offload_weight_update_variables,
        }

    def _check_switches(self) -> None:
        require_switches(**{one.name: getattr(self, one.name) for one in fields(self) if one.type == "bool"})
        require_switches_or_none(
            **{one.name: getattr(self, one.name) for one in fields(self) if one.type == "bool | None"}
        )
        if self.continuous_weight_updates:
            raise NotImplementedError("continuous_weight_updates is not supported, as in the original; leave it out")
        if self.replicated_optimizer_state_sharding and self.offload_weight_update_variables is False:
            raise ValueError(
                "replicated_optimizer_state_sharding is True, and offload_weight_update_variables is False; only "
                "offloaded optimizer state can be sharded: leave offload_weight_update_variables out"
            )

    def _check_stage_options(self) -> None:
        number = len(self.computational_stages)
        for name in ("forward_propagation_stages_poplar_options", "backward_propagation_stages_poplar_options"):
            options = getattr(self, name)
            if options is None:
                continue
            if not isinstance(options, Sequence) or not all(isinstance(one, PipelineStageOptions) for one in options):
                raise TypeError(f"{name} is {options!r}; it must be a list of PipelineStageOptions, one for each stage")
            if len(options) != number:
                raise ValueError(f"{name} has {len(options)} PipelineStageOptions for {number} stages; give one each")
        expected = "it must be one PipelineStageOptions"
        check_optional(
            "weight_update_poplar_options", self.weight_update_poplar_options, PipelineStageOptions, expected
        )

    def _method(self) -> GradientAccumulationReductionMethod:
        method = GradientAccumulationReductionMethod.parse(self.reduction_method)
        if self.batch_serialization_iterations > 1 and method is not GradientAccumulationReductionMethod.SUM:
            raise ValueError(
                f"batch_serialization_iterations is {self.batch_serialization_iterations}, and reduction_method is "
                f"{method.name}; batch serialization adds gradients up: use SUM"
            )
        return method

    def _pipelining(self, device_mapping: DeviceMapping) -> Pipelining:
        mode, allowed = self.recomputation_mode, current_defaults().recomputes
        if allowed is False and mode is not None:
            logger.warning("%s has no effect, because allow_recompute is False in the configuration", mode)
        return Pipelining(
            device_mapping,
            self.pipeline_schedule,
            recompute=mode is not None if allowed is None else allowed,
            batch_serialization_iterations=self.batch_serialization_iterations,
            recomputation_mode=mode,
            offload_activations=bool(self.offload_activations),
            offload_gradient_accumulation_buffers=bool(self.offload_gradient_accumulation_buffers),
            allow_idle_devices=True,
        )

    def init(self, variables: Variables, model_state: Tree = None) -> TrainState:
        """Return the initial state, with instance 0's values on every instance. Collective on several instances.

        Args:
            variables: First argument of each stage.
            model_state: Dictionary that stages read with `pipelining_ops.get_model_state` and change with
                `update_model_state`, or None. After an update, floating-point leaves are means over all replicas, and
                other leaves are those of replica 0.

        Raises:
            RuntimeError: Inside `strategy.run`; call pipelines outside, because they run their stages themselves.
            ValueError: If the last stage has outputs but there is no outfeed, or if `Trainer` refuses an option.
        """
        check_outside_replica("init of a pipeline")
        learning = [] if self.optimizer_function is None else [self.optimizer_function]
        reads = CapturedValues(*self._functions.all_stages, *learning)
        closed = self._described(variables, model_state)
        reads.settle()
        self._reads = reads
        if self._output is None:
            everywhere = self.strategy.broadcast({"variables": variables, "model_state": model_state})
            return TrainState(everywhere["variables"], None, 0, model_state=everywhere["model_state"])
        optimizer, map_gradient = unwrapped(self._output.opt)
        self._captures = Captures()
        if self._output.gradient_capture_context is not None:
            self._captures = Captures(
                shapes_by_tag(closed),
                self._timetable.num_micro_batches,
                self.gradient_accumulation_for_captured_grads,
                self.options["reduction_method"],
                self.gradient_accumulation_dtype,
            )
        if map_gradient is not None and self._captures.shapes:
            raise ValueError(
                "opt is a MapGradientOptimizer, and a gradient_capture_context captures gradients, which the function "
                "of opt would map too; use one of the two"
            )
        take = None if self.outfeed_queue is None else self._take
        self._trainer = Trainer(
            self.strategy,
            self._captures.loss(self._loss),
            self._captures.optimizer(optimizer),
            map_gradient=map_gradient,
            trainable=self._captures.trainable(self._output.variables),
            **{**self.options, "pipeline": replace(self.options["pipeline"], take_outputs=take, watch=self._watch)},
        )
        return self._captures.shown(self._trainer.init(self._captures.extended(variables), model_state))

    def __call__(self, state: TrainState) -> TrainState:
        """Run all micro-batches `repeat_count` times, each followed by an update; the given state is used up.

        Args:
            state: Latest result of `init` or of a call.

        Raises:
            RuntimeError: Before `init`, or inside `strategy.run`.
            EndOfDataError: If the infeed has too few elements.
        """
        check_outside_replica("a pipeline")
        if not isinstance(state, TrainState) or self._reads is None or (self._trainer or self._inference) is None:
            raise RuntimeError("a pipeline was called before init; start with state = net.init(variables)")
        self._reads.insist("in the inputs, the infeed or the model state, or call init again")
        for _ in range(self.repeat_count):
            elements = self._elements()
            if self._trainer is not None:
                state = self._updated(self._trainer, state, elements)
            elif self._inference is not None:
                self._made, spans = self._inference(state, elements)
                self._watch(spans)
            self._enqueue_outputs()
        return state

    # ---- computing

    def _loss(self, variables: Variables, batch: Batch, key: jax.Array, model_state: Tree = None) -> Outcome:
        with tracing(MicroBatch(get_current_iteration_counter(), key, model_state)) as known:
            outputs = listed(self._functions.outputs(variables, [leaf[0] for leaf in batch[1:]]))
            loss = self.learned(*outputs).loss
        return Outcome(loss, model_state=known.model_state, outputs=self._outfeed.chosen(outputs, loss))

    def learned(self, *outputs: Tree) -> OptimizerFunctionOutput:
        """Call the optimizer function with the outputs of the last stage, as a part of it."""
        assert self.optimizer_function is not None
        with pipeline_stage(len(self.computational_stages) - 1):
            found = self.optimizer_function(*outputs)
        if not isinstance(found, OptimizerFunctionOutput):
            raise TypeError(
                f"the optimizer_function returns {found!r}, a {type(found).__name__}; it must return an "
                "OptimizerFunctionOutput"
            )
        return found

    def _described(self, variables: Variables, model_state: Tree) -> core.ClosedJaxpr:
        """Trace the pipeline and check it; keep the optimizer function's result, or the programs without training."""
        learns, replicas = self.optimizer_function is not None, self.strategy.replicas
        seen: list[Tree] = []

        def traced(variables: Variables, leaves: Tree, number: Tree, index: Tree, key: Tree, model_state: Tree) -> Tree:
            context = replicas.new_context(index, "pipeline", is_watched=True)
            with replica_context(context), tracing(MicroBatch(number, key, model_state)):
                outputs = self._functions.outputs(variables, leaves, are_made=not learns)
                if learns:
                    outputs = seen[:] = listed(outputs)
                    self._output = self.learned(*outputs)
                else:
                    check_stages_independent(context.has_feeds, context.is_independent, self._timetable)
                return jax.tree.map(jnp.asarray, outputs)

        key = jax.random.key(0) if learns else None
        arguments = (variables, self._functions.spec, np.int32(0), np.int32(0), key, model_state)
        closed, outputs = jax.make_jaxpr(traced, return_shape=True)(*arguments)
        check_nothing_captured(closed)
        self._outfeed.check_outputs(listed(outputs))
        if learns:
            self._take_constants(seen, jax.tree.leaves(outputs))
        else:
            widths = self.options["pipeline"].widths(self._timetable)
            self._inference = _Inference(replicas, closed, (arguments, outputs), self._timetable, widths)
        return closed

    def _take_constants(self, outputs: Sequence[Tree], shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Rebuild an optimizer that depends on an input, such as a learning rate, from the input's constant value."""

        def is_made(leaf: Tree) -> bool:
            return isinstance(leaf, jax.core.Tracer)

        def learned(*made: jax.Array) -> None:
            values = iter(made)
            self._output = self.learned(*jax.tree.map(lambda leaf: next(values) if is_made(leaf) else leaf, outputs))

        made = [shape for leaf, shape in zip(jax.tree.leaves(outputs), shapes, strict=True) if is_made(leaf)]
        if len(made) < len(shapes):  # with vmap, what depends on a stage's result is a tracer, and constants are none
            jax.vmap(learned)(*(jnp.zeros((1, *one.shape), one.dtype) for one in made))
        assert self._output is not None
        if next(tracers_in(unwrapped(self._output.opt)), None) is not None:
            raise ValueError(
                "the optimizer of the optimizer_function depends on a stage's result, but it is made once for all "
                "updates; make it of inputs that stages pass on, or use optax.inject_hyperparams or a schedule"
            )

    @property
    def _replication(self) -> Replication:
        return self.strategy.replicas.reducer.replication

    def _updated(self, trainer: Trainer, state: TrainState, elements: _Elements) -> TrainState:
        trained = replace(state, variables=self._captures.extended(state.variables))
        every = [element for own in elements for element in own]
        # An array of zeros counts rows without an infeed.
        batch = [np.zeros(len(every), np.int32), *(np.stack(leaves) for leaves in zip(*every, strict=True))]
        trained, self.metrics = trainer.step(trained, batch)
        assert self._output is not None
        if self._output.gradient_capture_context is not None:
            captured = self._captures.of(trainer.whole(trained))
            self._output.gradient_capture_context.take(captured)
            queue = self._output.captured_gradient_outfeed
            if queue is not None and captured:
                queue.put(self._replication, next(self._numbers), [captured for _ in self._replication.local])
        return self._captures.shown(trained)

    def _watch(self, replicas: Mapping[int, Sequence[Timed]]) -> None:
        self.trace = Trace(replicas)

    def _take(self, outputs: Mapping[int, Sequence[Tree]]) -> None:
        self._made = outputs

    # ---- elements and outputs

    def _elements(self) -> _Elements:
        """Return the arrays of the elements by local replica and micro-batch."""
        count = self._timetable.num_micro_batches
        if self.infeed_queue is None:
            return [[[] for _ in range(count)] for _ in self._replication.local]
        return self.infeed_queue.take(self._replication, count)

    def _enqueue_outputs(self) -> None:
        queue = self.outfeed_queue
        of_each = list(self._made.values())
        if queue is None or not jax.tree.leaves(of_each):
            return
        if self._outfeed.accumulates:
            of_each = [[self._outfeed.summed(own)] for own in of_each]
        for values in zip(*of_each, strict=True):
            queue.put(self._replication, next(self._numbers), values)


class _Inference:
    """The forward passes of a traced pipeline; they run on all replicas.

    Args:
        replicas: Replicas that run the stages.
        closed: Computation of a micro-batch.
        like: Its arguments (variables, element, its number, index of the replica, key, model state), and its results.
        timetable: Schedule of the passes.
        widths: Number of functions of each stage.

    Raises:
        ValueError: If the function cannot be cut into these stages.
    """

    def __init__(
        self,
        replicas: Replicas,
        closed: core.ClosedJaxpr,
        like: tuple[Tree, Tree],
        timetable: Timetable,
        widths: Sequence[int],
    ) -> None:
        self._replicas, self._timetable, self._schedule_graph = replicas, timetable, ScheduleGraph.of(timetable)
        graph, shapes = Graph.of(closed), tuple(shapes_of(closed.in_avals))
        check_shard_marks(graph, timetable.mapping)
        arguments, results = map(jax.tree.structure, like)
        self._places = jax.tree.unflatten(arguments, range(len(shapes)))
        varying = frozenset(jax.tree.leaves(self._places[1:3]))
        self._staged = Staged(cut_in_stages(graph, widths), shapes, varying=varying)
        self._outputs = MicroBatchOutputs(results, range(len(graph.results)))
        executables, numbers = Executables(replicas.devices.compile), range(len(self._staged.segments))
        self._programs = [StagePrograms(self._staged, number, Accumulators(), executables) for number in numbers]

    def __call__(
        self, state: TrainState, elements: _Elements
    ) -> tuple[Mapping[int, Sequence[Tree]], Mapping[int, Sequence[Timed]]]:
        """Return for each local replica the outputs of its micro-batches, and the timed work of its devices.

        Raises:
            BaseException: The exception that a stage has raised.
        """
        begin_s, grid = time.perf_counter(), self._replicas.grid  # the grid grows when instances are lost
        runs = [self._prepared(grid, position, state, own) for position, own in enumerate(elements)]
        runners = [ScheduleRunner(self._schedule_graph, begin_s) for _ in runs]

        def follow(device: int, position: int) -> None:
            runners[position].follow(device, runs[position].perform)

        columns = grid.columns[: len(self._timetable.devices)]
        raise_first(begin_devices(columns, follow, self._replicas.reducer.fail))
        outputs = {replica: run.outputs_of(self._outputs) for replica, run in zip(grid.replicas, runs, strict=True)}
        return outputs, {replica: runner.spans for replica, runner in zip(grid.replicas, runners, strict=True)}

    def _prepared(
        self, grid: DeviceGrid, position: int, state: TrainState, elements: Sequence[Sequence[np.ndarray]]
    ) -> ReplicaStages:
        variables, leaves, number, index, _, model_state = self._places
        of_state = zip(
            jax.tree.leaves((variables, model_state)),
            jax.tree.leaves((state.variables, state.model_state)),
            strict=True,
        )
        each: dict[int, Sequence[StageArray]] = dict(zip(leaves, zip(*elements, strict=True), strict=True))
        each[number] = [np.int32(micro_batch) for micro_batch in range(len(elements))]
        devices = [column.device_of(position) for column in grid.columns]
        run = ReplicaStages(self._staged, self._programs, self._timetable.mapping, devices)
        run.prepare(StepArguments({**dict(of_state), index: np.int32(grid.replicas[position])}, each, {}))
        return run


def _whole(count: Number) -> Number:
    """Convert a count that may be an integer array without dimensions."""
    is_array = isinstance(count, np.ndarray | jax.Array) and not count.ndim
    return int(count) if is_array and jnp.issubdtype(count.dtype, jnp.integer) else count


def _check_functions(stages: Sequence[Stage], learns: bool) -> None:
    tracer = next(tracers_in(list(stages)), None)
    if tracer is not None:
        raise ValueError(
            f"Trying to capture the tensor {tracer.aval} in a stage, but another program computes it; pass it in inputs"
        )
    if learns and not callable(stages[-1]):
        raise ValueError(
            "the last stage is a list of functions, and the optimizer_function needs the outputs of all of them; "
            "add a stage after it that is one function"
        )
