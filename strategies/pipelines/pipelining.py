"""The option of a Trainer that cuts its loss function into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from strategies.numbers import positive
from strategies.pipelines.arguments import Arguments
from strategies.pipelines.mapping import DeviceMapping, Stage, checked_count, places_of, schedule_for
from strategies.pipelines.marks import cut_in_stages
from strategies.pipelines.schedules.registry import PipelineSchedule
from strategies.pipelines.schedules.sequential import serialized
from strategies.pipelines.stage_gradients import PipelinePlan, Watch
from strategies.pipelines.stage_plan import StagePlan
from strategies.pipelines.stages import Staged
from strategies.pipelines.timetable import Places, Timetable
from strategies.programs.jaxpr import Graph
from strategies.replicas.replicas import Replicas
from strategies.step.replica_program import ReplicaProgram, ReplicaShapes
from strategies.step.shards import Shards


@dataclass(frozen=True)
class Pipelining:
    """A replica spans several devices, each with some stages of the loss function, which `pipeline_stage` marks.

    Semantics: the original's `pipelining_ops.pipeline`. No schedule, mapping or recomputation changes a bit.

    Attributes:
        device_mapping: the device of each stage, 0 to ipus_per_replica - 1.
        schedule: which stage works on which micro-batch when: a member of `PipelineSchedule` or its name.
        recompute: whether stages keep their inputs only, and run their forward passes again for the backward passes.
        batch_serialization_iterations: each stage takes so many micro-batches one after another; all are on one device.
        watch: called after each step.

    Raises:
        TypeError: if the mapping is no list of whole numbers, or the schedule no member and no name.
        ValueError: if there is no such schedule, or the iterations are not positive.
        NotImplementedError: for another schedule than Sequential with batch serialization.
    """

    device_mapping: DeviceMapping
    schedule: PipelineSchedule | str | None = None
    recompute: bool = False
    batch_serialization_iterations: int = 1
    watch: Watch | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recompute, bool):
            raise TypeError(f"recompute of a pipeline is {self.recompute!r}; it is True or False")
        positive("batch_serialization_iterations", self.batch_serialization_iterations)
        _ = self._schedule
        if not isinstance(self.device_mapping, Sequence) or isinstance(self.device_mapping, str):
            raise TypeError(
                f"device_mapping is {self.device_mapping!r}, a {type(self.device_mapping).__name__}; it must be a "
                "list of devices, one for each stage"
            )

    @cached_property
    def _schedule(self) -> Any:
        return schedule_for(self.schedule, self.batch_serialization_iterations)

    @property
    def terms(self) -> Mapping[str, object]:
        """See `Pipeline`."""
        return {
            "device_mapping": list(self.device_mapping),
            "schedule": self._schedule.name,
            "recompute": self.recompute,
            "batch_serialization_iterations": self.batch_serialization_iterations,
        }

    def places(self, ipus_per_replica: int) -> Places:
        """The devices of each stage; see `places_of` for what is refused."""
        stages: list[Stage] = [
            [_nothing] * len(devices) if isinstance(devices, Sequence) else _nothing for devices in self.device_mapping
        ]
        return places_of(stages, self.device_mapping, ipus_per_replica, self.batch_serialization_iterations)

    def timetable(self, ipus_per_replica: int, count: int, training: bool = True) -> Timetable:
        """What each device does for an update.

        Args:
            ipus_per_replica: the devices of a replica.
            count: of micro-batches.
            training: whether there are backward passes.

        Raises:
            FailedPreconditionError: if the count is no multiple of what the schedule needs.
        """
        places = self.places(ipus_per_replica)
        if self.batch_serialization_iterations > 1:
            return serialized(places, count, training, self.batch_serialization_iterations)
        checked_count(count, self._schedule, places, training)
        made: Timetable = self._schedule.timetable(places, count, training)
        return made

    def plan(
        self, replicas: Replicas, program: ReplicaProgram, shapes: ReplicaShapes, shards: Shards | None
    ) -> PipelinePlan:
        """See `Pipeline`."""
        timetable = self.timetable(replicas.grid.ipus_per_replica, program.accumulation.count)
        arguments = Arguments.of(program, shapes)
        closed = jax.make_jaxpr(arguments.loss)(*arguments.shapes)
        _refuse_what_meets(program, timetable)
        graph = Graph.of(closed)
        carried, untouched = arguments.carried(graph)
        widths = [len(places) if isinstance(given, Sequence) else 1 for places, given in self._pairs(timetable)]
        staged = Staged(
            cut_in_stages(graph, widths, untouched),
            tuple(arguments.shapes),
            arguments.weights,
            arguments.varying,
            carried,
            0,
        )
        arguments.refuse_spread(staged, timetable.mapping)
        stages = StagePlan(replicas.devices, program, arguments, staged, timetable, shards, self.recompute)
        return PipelinePlan(stages, closed, self.watch)

    def _pairs(self, timetable: Timetable) -> list[tuple[tuple[int, ...], Any]]:
        return list(zip(timetable.mapping, self.device_mapping, strict=True))


def _nothing() -> None:
    """In the place of a function of a stage."""


def _refuse_what_meets(program: ReplicaProgram, timetable: Timetable) -> None:
    if program.has_feeds:
        raise ValueError(
            "a stage of the pipeline uses an infeed or outfeed, and stages take several micro-batches at once; give "
            "elements as the batch, and return outputs"
        )
    if not program.is_independent and not timetable.in_turn and len(timetable.devices) > 1:
        raise ValueError(
            "a stage of the pipeline calls a collective of the replicas, which have to call all of them in one order, "
            "and the schedule runs stages at the same time; use the schedule 'Sequential', or call it outside of the "
            "loss function"
        )
