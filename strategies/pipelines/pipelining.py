"""The option of a Trainer that cuts its loss function into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import jax
from jax.extend import core

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import positive, wrong_type
from strategies.defaults import current_defaults
from strategies.exchange.flat import Shards
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.programs.jaxpr import Graph, ProgramSegment, every_equation
from strategies.jax.programs.recomputation import is_mark, recomputing
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.running.arguments import LOSS, TOTAL, Arguments
from strategies.pipelines.running.stage_gradients import PipelinePlan, Take, Watch
from strategies.pipelines.running.stage_programs import Executables, MicroBatchOutputs, Staged, StashPolicy
from strategies.pipelines.stages import (
    DeviceMapping,
    check_no_idle_devices,
    check_shard_marks,
    cut_in_stages,
    places_of,
    schedule_for,
    stages_like,
    timetable_for,
)
from strategies.pipelines.timetable import PipelineSchedule, Schedule, Timetable


class RecomputationMode(Enum):
    """The way to recompute the values that backward passes need; the original's enum.

    `Auto` and `RecomputeThenBackpropagate` run a stage's whole forward pass again before its backward pass.
    `RecomputeAndBackpropagateInterleaved` recomputes the blocks between two `recomputation_checkpoint`s one after
    another, each before its part of the backward pass.
    """

    Auto = 1
    RecomputeThenBackpropagate = 2
    RecomputeAndBackpropagateInterleaved = 3


@dataclass(frozen=True)
class Pipelining:
    """The option to span a replica over several devices, each with some stages of the loss function.

        trainer = strategies.Trainer(
            strategy,
            loss_fn,  # which marks stages 0 and 1 with strategies.pipeline_stage
            optax.adam(1e-3),
            gradient_accumulation_count=8,
            pipeline=strategies.Pipelining(device_mapping=[0, 1]),
        )

    Semantics: the original's `pipelining_ops.pipeline`. No schedule, mapping or recomputation changes a bit.

    Attributes:
        device_mapping: The device of each stage, 0 to ipus_per_replica - 1.
        schedule: The order of the stages' work: a member of `PipelineSchedule` or its name.
        recompute: Whether stages keep their inputs only, and run their forward passes again for the backward passes.
            None: as the defaults of the strategy in whose scope the option is made, or `allow_recompute` of the
            configuration in force (`strategies.config`); otherwise False.
        batch_serialization_iterations: Number of micro-batches that each stage takes one after another. Above 1, all
            stages must be on one device.
        recomputation_mode: `RecomputeAndBackpropagateInterleaved` makes stages with a `recomputation_checkpoint`
            recompute one block after another. None: they run their whole forward passes again.
        offload_activations: Whether the values for backward passes are kept in host memory.
        offload_gradient_accumulation_buffers: Whether accumulators are kept in host memory between additions.
        watch: A function, called after each step with the timed actions of each local replica's devices.
        take_outputs: A function, called after each step with the outputs of an `Outcome`, for each local replica and
            micro-batch.
        allow_idle_devices: Whether the mapping may leave devices out, as pipelines of functions may.

    Raises:
        TypeError: If the mapping is no list of whole numbers, the schedule neither a member nor a name, or a switch
            neither True nor False.
        ValueError: If there is no such schedule, the iterations are not positive, or the mapping has gaps.
        NotImplementedError: If another schedule than Sequential is combined with batch serialization, or Interleaved
            with `RecomputeAndBackpropagateInterleaved`.
    """

    device_mapping: DeviceMapping
    schedule: PipelineSchedule | str | None = None
    recompute: bool | None = None
    batch_serialization_iterations: int = 1
    recomputation_mode: RecomputationMode | None = None
    offload_activations: bool = False
    offload_gradient_accumulation_buffers: bool = False
    watch: Watch | None = None
    take_outputs: Take | None = None
    allow_idle_devices: bool = False

    def __post_init__(self) -> None:
        require_switches_or_none(recompute=self.recompute)
        require_switches(
            offload_activations=self.offload_activations,
            offload_gradient_accumulation_buffers=self.offload_gradient_accumulation_buffers,
            allow_idle_devices=self.allow_idle_devices,
        )
        _ = self.recomputes  # cache the present configuration
        if not isinstance(self.recomputation_mode, RecomputationMode | None):
            raise TypeError(f"recomputation_mode is {self.recomputation_mode!r}; use a member of RecomputationMode")
        positive("batch_serialization_iterations", self.batch_serialization_iterations)
        is_in_turns = self._schedule.name == "interleaved"
        if is_in_turns and self.recomputation_mode is RecomputationMode.RecomputeAndBackpropagateInterleaved:
            raise NotImplementedError(
                "recomputation_mode is RecomputeAndBackpropagateInterleaved with the schedule Interleaved, which the "
                "original does not combine; use RecomputeThenBackpropagate, or the schedule Grouped"
            )
        if not isinstance(self.device_mapping, Sequence) or isinstance(self.device_mapping, str):
            raise wrong_type("device_mapping", self.device_mapping, "it must be a list of devices, one for each stage")
        if not self.allow_idle_devices:
            check_no_idle_devices(self.device_mapping)

    @cached_property
    def recomputes(self) -> bool:
        """Whether stages recompute: `recompute`, or if that is None, the configuration when this object was made."""
        if self.recompute is None:
            return bool(current_defaults().recomputes)
        return self.recompute

    @cached_property
    def _schedule(self) -> Schedule:
        return schedule_for(self.schedule, self.batch_serialization_iterations)

    @property
    def terms(self) -> Mapping[str, object]:
        """The options that must be the same on all instances."""
        return {
            "device_mapping": list(self.device_mapping),
            "schedule": self._schedule.name,
            "recompute": self.recomputes,
            "batch_serialization_iterations": self.batch_serialization_iterations,
        }

    def timetable(self, ipus_per_replica: int, count: int, training: bool = True) -> Timetable:
        """Return the actions of each device for an update.

        Raises:
            FailedPreconditionError: If the count is no multiple of the number that the schedule needs.
        """
        mapping, iterations = self.device_mapping, self.batch_serialization_iterations
        places = places_of(stages_like(mapping, len(mapping)), mapping, ipus_per_replica, iterations)
        return timetable_for(self._schedule, places, count, training, iterations)

    def plan(
        self, replicas: Replicas, program: ReplicaProgram, shapes: ReplicaShapes, shards: Shards | None
    ) -> PipelinePlan:
        """Return the plan of the stages' programs."""
        if program.places.is_weighted:
            program.check_losses_scalable("the loss of a pipeline has weights")
        timetable = self.timetable(replicas.grid.ipus_per_replica, program.num_micro_batches)
        arguments = Arguments.of(program, shapes, self.take_outputs is not None)
        closed, (_, _, after, outputs) = jax.make_jaxpr(arguments.loss, return_shape=True)(*arguments.shapes)
        check_nothing_captured(closed)
        check_stages_independent(program.has_feeds, program.is_independent, timetable)
        graph = Graph.of(closed)
        check_shard_marks(graph, timetable.mapping)
        carried, untouched = arguments.carried(graph)
        staged = Staged(
            cut_in_stages(graph, self.widths(timetable), untouched, arguments.places[0]),
            tuple(arguments.shapes),
            arguments.weights,
            arguments.varying,
            carried,
            LOSS,
        )
        blocks: frozenset[int] = frozenset()
        if self.recomputes and self.recomputation_mode is RecomputationMode.RecomputeAndBackpropagateInterleaved:
            staged, blocks = in_blocks(staged)
        arguments.check_values_not_shared(staged, timetable.mapping)
        first = TOTAL + 1 + len(after)
        out = MicroBatchOutputs(jax.tree.structure(outputs), range(first, first + len(jax.tree.leaves(outputs))))
        offloads = (self.offload_activations, self.offload_gradient_accumulation_buffers)
        keeping = StashPolicy(self.recomputes, *offloads, blocks)
        executables, after_step = Executables(replicas.devices.compile), (self.watch, self.take_outputs)
        return PipelinePlan(executables, arguments, closed, staged, timetable, shards, keeping, out, *after_step)

    def widths(self, timetable: Timetable) -> list[int]:
        """Return the number of functions of each stage."""
        pairs = zip(timetable.mapping, self.device_mapping, strict=True)
        return [len(places) if isinstance(given, Sequence) else 1 for places, given in pairs]


def in_blocks(staged: Staged) -> tuple[Staged, frozenset[int]]:
    """Make segments with a `recomputation_checkpoint` recompute by blocks; also return these segments' numbers."""

    def has_mark(segment: ProgramSegment) -> bool:
        given = segment.read(staged.arguments, staged.shapes)
        return any(map(is_mark, every_equation(jax.make_jaxpr(segment.function)(*given).jaxpr)))

    marked = frozenset(number for number, segment in enumerate(staged.segments) if has_mark(segment))
    changed = (
        replace(segment, function=recomputing(segment.function, "blocks")) if number in marked else segment
        for number, segment in enumerate(staged.segments)
    )
    return replace(staged, stages=tuple(tuple(next(changed) for _ in own) for own in staged.stages)), marked


def check_nothing_captured(closed: core.ClosedJaxpr) -> None:
    """Raise if the traced function reads values of another program.

    Raises:
        ValueError: For the first such value.
    """
    for value in closed.consts:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"Trying to capture the tensor {value.aval} in a stage, but another program computes it; pass it in "
                "as an input"
            )


def check_stages_independent(has_feeds: bool, is_independent: bool, timetable: Timetable) -> None:
    """Raise if stages use feeds or collectives, which need one fixed order, but stages run at the same time.

    Raises:
        ValueError: If stages use feeds. Also if they call collectives, and the schedule runs stages at the same time.
    """
    if has_feeds:
        raise ValueError(
            "a stage of the pipeline uses an infeed or outfeed, but stages take several micro-batches at once; pass "
            "elements as the batch, and return outputs"
        )
    if not is_independent and not timetable.in_turn and len(timetable.devices) > 1:
        raise ValueError(
            "a stage of the pipeline calls a collective of the replicas. All replicas must call collectives in one "
            "order, but the schedule runs stages at the same time; use the schedule 'Sequential', or call the "
            "collective outside of the loss function"
        )
