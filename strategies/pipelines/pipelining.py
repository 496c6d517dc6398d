"""The option of a Trainer that cuts its loss function into stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import jax
from jax.extend import core

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import positive, wrong_type
from strategies.defaults import current_defaults
from strategies.exchange.shards import Shards
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.programs.jaxpr import Graph, every_equation
from strategies.jax.programs.recomputation import MARK, recomputing
from strategies.jax.programs.segments import ProgramSegment
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.advice import choose_for
from strategies.pipelines.mapping import (
    DeviceMapping,
    places_of,
    refuse_idle_devices,
    schedule_for,
    stages_like,
    timetable_for,
)
from strategies.pipelines.marks import cut_in_stages, refuse_other_shards
from strategies.pipelines.running.arguments import LOSS, TOTAL, Arguments
from strategies.pipelines.running.replica_run import MicroBatchOutputs, StashPolicy
from strategies.pipelines.running.stage_gradients import PipelinePlan, Take, Watch
from strategies.pipelines.running.stage_plan import StagePlan
from strategies.pipelines.running.stage_programs import Executables
from strategies.pipelines.running.staged import Staged
from strategies.pipelines.schedules import PipelineSchedule, Schedule
from strategies.pipelines.timetable import Places, Timetable

AUTO = "auto"
"""In place of a schedule: the fastest that fits into the memory."""

logger = logging.getLogger(__name__)


class RecomputationMode(Enum):
    """The way to recompute the values that backward passes need; the original's enum.

    The whole forward pass of a stage runs again before its backward pass, or one block between two
    `recomputation_checkpoint`s after another, each before the part of the backward pass that needs it.
    """

    Auto = 1
    RecomputeThenBackpropagate = 2
    RecomputeAndBackpropagateInterleaved = 3


@dataclass(frozen=True)
class Pipelining:
    """A replica spans several devices, each with some stages of the loss function, which `pipeline_stage` marks.

    Semantics: the original's `pipelining_ops.pipeline`. No schedule, mapping or recomputation changes a bit.

    Attributes:
        device_mapping: the device of each stage, 0 to ipus_per_replica - 1.
        schedule: which stage works on which micro-batch when: a member of `PipelineSchedule` or its name; or "auto":
            instance 0 measures the stages before the first step, and that one is used whose update is the shortest in a
            simulation, with or without recomputation (see `choose`); a line of logging says why. Sequential is used
            where stages call collectives.
        recompute: whether stages keep their inputs only, and run their forward passes again for the backward passes.
            None: as the defaults of the strategy in whose scope this is made say, or `allow_recompute` of the
            configuration in force (`strategies.config`); otherwise not.
        batch_serialization_iterations: each stage takes so many micro-batches one after another; all are on one device.
        recomputation_mode: `RecomputeAndBackpropagateInterleaved` makes stages with a `recomputation_checkpoint`
            recompute one block after another. None: they run their whole forward passes again.
        offload_activations: keep what backward passes need in host memory.
        offload_gradient_accumulation_buffers: keep accumulators there while nothing is added to them.
        watch: called after each step with what the devices of each local replica did when.
        memory_limit_bytes: with "auto": what a device may keep of micro-batches for backward passes; None for no limit.
        take_outputs: called after each step with the outputs of an `Outcome`, for each local replica those of each
            micro-batch.
        allow_idle_devices: let the mapping leave devices out, as pipelines of functions may.

    Raises:
        TypeError: if the mapping is no list of whole numbers, the schedule no member and no name, or a switch neither
            True nor False.
        ValueError: if there is no such schedule, or the iterations are not positive; if the mapping has gaps.
        NotImplementedError: for another schedule than Sequential with batch serialization, and for Interleaved with
            `RecomputeAndBackpropagateInterleaved`.
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
    memory_limit_bytes: int | None = None
    allow_idle_devices: bool = False

    def __post_init__(self) -> None:
        require_switches_or_none(recompute=self.recompute)
        require_switches(
            offload_activations=self.offload_activations,
            offload_gradient_accumulation_buffers=self.offload_gradient_accumulation_buffers,
            allow_idle_devices=self.allow_idle_devices,
        )
        _ = self.recomputes  # as it is configured now
        if not isinstance(self.recomputation_mode, RecomputationMode | None):
            raise TypeError(f"recomputation_mode is {self.recomputation_mode!r}; use a member of RecomputationMode")
        positive("batch_serialization_iterations", self.batch_serialization_iterations)
        self._refuse_with_auto()
        is_in_turns = self._schedule.name == "interleaved"
        if is_in_turns and self.recomputation_mode is RecomputationMode.RecomputeAndBackpropagateInterleaved:
            raise NotImplementedError(
                "recomputation_mode is RecomputeAndBackpropagateInterleaved, and the schedule Interleaved, which the "
                "original does not take together; use RecomputeThenBackpropagate, or the schedule Grouped"
            )
        if not isinstance(self.device_mapping, Sequence) or isinstance(self.device_mapping, str):
            raise wrong_type("device_mapping", self.device_mapping, "it must be a list of devices, one for each stage")
        if not self.allow_idle_devices:
            refuse_idle_devices(self.device_mapping)

    def _refuse_with_auto(self) -> None:
        if self.is_automatic and (self.recompute or self.batch_serialization_iterations > 1):
            raise ValueError(
                f'schedule is "auto", with recompute={self.recomputes} and batch_serialization_iterations='
                f'{self.batch_serialization_iterations}; "auto" decides on both: leave them out, or name a schedule'
            )
        if self.memory_limit_bytes is not None:
            positive("memory_limit_bytes", self.memory_limit_bytes)
            if not self.is_automatic:
                raise ValueError(
                    f"memory_limit_bytes is {self.memory_limit_bytes}, and the schedule is {self._schedule.name}; a "
                    'limit is what schedule="auto" chooses by: use that, or no limit'
                )

    @property
    def is_automatic(self) -> bool:
        """Whether the schedule is chosen by measured times."""
        return self.schedule == AUTO

    @cached_property
    def recomputes(self) -> bool:
        """Whether stages recompute: as `recompute` says, otherwise as it was configured when this was made."""
        if self.recompute is None:
            return bool(current_defaults().recomputes) and not self.is_automatic
        return self.recompute

    @cached_property
    def _schedule(self) -> Schedule:
        named = PipelineSchedule.Sequential if self.is_automatic else self.schedule
        return schedule_for(named, self.batch_serialization_iterations)

    @property
    def terms(self) -> Mapping[str, object]:
        """See `PipelinePlanner`."""
        return {
            "device_mapping": list(self.device_mapping),
            "schedule": AUTO if self.is_automatic else self._schedule.name,
            "memory_limit_bytes": self.memory_limit_bytes,
            "recompute": self.recomputes,
            "batch_serialization_iterations": self.batch_serialization_iterations,
        }

    def places(self, ipus_per_replica: int) -> Places:
        """Return the devices of each stage; see `places_of` for what is refused."""
        stages = stages_like(self.device_mapping, len(self.device_mapping))
        return places_of(stages, self.device_mapping, ipus_per_replica, self.batch_serialization_iterations)

    def timetable(self, ipus_per_replica: int, count: int, training: bool = True) -> Timetable:
        """Return the actions of each device for an update.

        Raises:
            FailedPreconditionError: if the count is no multiple of what the schedule needs.
        """
        places = self.places(ipus_per_replica)
        return timetable_for(self._schedule, places, count, training, self.batch_serialization_iterations)

    def plan(
        self, replicas: Replicas, program: ReplicaProgram, shapes: ReplicaShapes, shards: Shards | None
    ) -> PipelinePlan:
        """See `PipelinePlanner`."""
        executables = Executables(replicas.devices.compile)
        if not self.is_automatic:
            return self._plan(replicas, program, shapes, shards, executables)
        sequential = replace(self, schedule=PipelineSchedule.Sequential, memory_limit_bytes=None)
        first = sequential._plan(replicas, program, shapes, shards, executables)
        if not program.is_independent:
            logger.info("sequential was chosen, because stages of the pipeline call collectives")
            return first
        choice = choose_for(replicas, first.stages, self.memory_limit_bytes)
        logger.info(choice.reason)
        chosen = replace(sequential, schedule=choice.chosen.schedule, recompute=choice.chosen.recompute)
        return chosen._plan(replicas, program, shapes, shards, executables)

    def _plan(
        self,
        replicas: Replicas,
        program: ReplicaProgram,
        shapes: ReplicaShapes,
        shards: Shards | None,
        executables: Executables,
    ) -> PipelinePlan:
        timetable = self.timetable(replicas.grid.ipus_per_replica, program.accumulation.count)
        arguments = Arguments.of(program, shapes, self.take_outputs is not None)
        closed, (_, _, after, outputs) = jax.make_jaxpr(arguments.loss, return_shape=True)(*arguments.shapes)
        refuse_captured(closed)
        refuse_what_meets(program.has_feeds, program.is_independent, timetable)
        graph = Graph.of(closed)
        refuse_other_shards(graph, timetable.mapping)
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
        arguments.refuse_spread(staged, timetable.mapping)
        first = TOTAL + 1 + len(after)
        out = MicroBatchOutputs(jax.tree.structure(outputs), range(first, first + len(jax.tree.leaves(outputs))))
        offloads = (self.offload_activations, self.offload_gradient_accumulation_buffers)
        keeping = StashPolicy(self.recomputes, *offloads, blocks)
        stages = StagePlan(executables, program, arguments, staged, timetable, shards, keeping, out)
        return PipelinePlan(stages, closed, self.watch, self.take_outputs)

    def widths(self, timetable: Timetable) -> list[int]:
        """Return the number of functions of each stage."""
        pairs = zip(timetable.mapping, self.device_mapping, strict=True)
        return [len(places) if isinstance(given, Sequence) else 1 for places, given in pairs]


def in_blocks(staged: Staged) -> tuple[Staged, frozenset[int]]:
    """Have the segments with a `recomputation_checkpoint` recompute block by block; the numbers of these segments."""
    marked = frozenset(number for number, segment in enumerate(staged.segments) if _has_mark(staged, segment))
    changed = (
        replace(segment, function=recomputing(segment.function, "blocks")) if number in marked else segment
        for number, segment in enumerate(staged.segments)
    )
    return replace(staged, stages=tuple(tuple(next(changed) for _ in own) for own in staged.stages)), marked


def _has_mark(staged: Staged, segment: ProgramSegment) -> bool:
    given = segment.read(staged.arguments, staged.shapes)
    equations = every_equation(jax.make_jaxpr(segment.function)(*given).jaxpr)
    return any(one.primitive.name == "name" and one.params["name"] == MARK for one in equations)


def refuse_captured(closed: core.ClosedJaxpr) -> None:
    """Refuse values of another program in what was traced.

    Raises:
        ValueError: naming the first one.
    """
    for value in closed.consts:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"Trying to capture the tensor {value.aval} in a stage, which another program computes; hand it over "
                "as an input"
            )


def refuse_what_meets(has_feeds: bool, is_independent: bool, timetable: Timetable) -> None:
    """Refuse what micro-batches or replicas would have to do in one order.

    Raises:
        ValueError: for feeds in stages, and collectives where stages run at the same time.
    """
    if has_feeds:
        raise ValueError(
            "a stage of the pipeline uses an infeed or outfeed, and stages take several micro-batches at once; give "
            "elements as the batch, and return outputs"
        )
    if not is_independent and not timetable.in_turn and len(timetable.devices) > 1:
        raise ValueError(
            "a stage of the pipeline calls a collective of the replicas, which have to call all of them in one order, "
            "and the schedule runs stages at the same time; use the schedule 'Sequential', or call it outside of the "
            "loss function"
        )
