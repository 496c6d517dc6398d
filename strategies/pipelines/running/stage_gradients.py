"""The gradients of a pipeline on local replicas, computed by a thread for each device of each replica."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import final

import jax
import numpy as np
from jax.extend import core
from typing_extensions import override

from strategies.exchange.flat import FlatLayout
from strategies.exchange.means import Allocate, Bucket
from strategies.jax.gradients.computation import Kept, ReplicaGradients, ReplicaPlan, ReplicaRun
from strategies.jax.gradients.leaving import MeansMemory
from strategies.jax.replicas.devices import DeviceGrid, borrow
from strategies.pipelines.running.driver import SHORT_S, Drive, begin_devices, raise_first
from strategies.pipelines.running.replica_run import ReplicaStages, back_on
from strategies.pipelines.running.stage_plan import StageBucket, StagePlan
from strategies.pipelines.timetable import ActionKind, StageAction, Timed
from strategies.typing import Tree, Variables

Watch = Callable[[Mapping[int, Sequence[Timed]]], None]
"""Gets, after each step, the timed actions of each local replica's devices."""

Take = Callable[[Mapping[int, Sequence[Tree]]], None]
"""Gets, after each step, the outputs of each local replica's micro-batches."""


@final
class PipelinePlan(ReplicaPlan):
    """A plan, for a Trainer, of the gradients of replicas that are pipelines: the programs of the stages."""

    def __init__(self, stages: StagePlan, closed: core.ClosedJaxpr, watch: Watch | None, take: Take | None) -> None:
        self.stages = stages
        self.leaving = stages.leaving
        sums = [each for stage in stages.stages for each in stage.sum_shapes]
        self.sum_bytes = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in sums)
        self.watch = watch
        self.take = take
        self._closed = closed

    @override
    def buckets(self, memory: MeansMemory) -> list[Bucket]:
        return self.stages.buckets_in(memory)

    @override
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the programs of the passes of stages, and of the end of a step."""
        return self.stages.executables([column.device_of(0) for column in grid.columns])

    @override
    def kept(self, grid: DeviceGrid) -> Sequence[Kept]:
        """Return the memory that each stage needs between passes, as `ReplicaStages.kept_bytes` counts it."""
        plan = self.stages
        nbytes = [0] * plan.timetable.num_stages
        for number, (stage, _) in enumerate(plan.staged.homes):
            device = grid.columns[plan.device_of(number)].device_of(0)
            nbytes[stage] += plan.stages[number].kept_bytes(device, plan.keeping.runs_again(number))
        return [Kept(stage, plan.timetable.stash(stage), of_stage) for stage, of_stage in enumerate(nbytes)]

    @override
    def equations(self) -> core.ClosedJaxpr:
        """Return the computation for a micro-batch, to be compared with other instances."""
        return self._closed

    @override
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> StageGradients:
        return StageGradients(self, grid, allocate, failed)


@final
class StageGradients(ReplicaGradients):
    """The gradients of local replicas that are pipelines, computed step by step."""

    _runs: Sequence[_ReplicaStep]

    def __init__(
        self, plan: PipelinePlan, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> None:
        self._plan = plan
        self._grid = grid
        self._failed = failed
        stages, at_once = plan.stages, _at_once(plan.stages, grid)
        runs = [_ReplicaStep(stages, grid, position, at_once) for position in range(len(grid.replicas))]
        memory = MeansMemory(plan.leaving, allocate)
        parts = [*(bucket.parts for bucket in stages.buckets), stages.state_parts]
        super().__init__(memory, plan.buckets(memory), parts, runs)

    @override
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        wait(self._begun)  # for a step that was given up
        flat = jax.tree.leaves(variables)
        begin_s = time.perf_counter()
        for run, arguments in zip(self._runs, of_replicas, strict=True):
            run.prepare(flat, arguments, others, begin_s)
        columns = self._grid.columns[: len(self._plan.stages.timetable.devices)]
        self._begun = begin_devices(columns, lambda device, position: self._runs[position].follow(device), self._failed)

    def _end(self) -> None:
        begun, self._begun = self._begun, []
        raise_first(begun)
        runs = dict(zip(self._grid.replicas, self._runs, strict=True))
        if self._plan.watch is not None:
            self._plan.watch({replica: run.drive.spans for replica, run in runs.items()})
        if self._plan.take is not None:
            self._plan.take({replica: run.outputs for replica, run in runs.items()})


def _at_once(plan: StagePlan, grid: DeviceGrid) -> AbstractContextManager[object]:
    """Return a context that limits how many devices compute at once: one per core, if memory is to be saved.

    Values that a stage recomputes exist while its backward pass runs. More devices than cores would hold more of them
    at once, and be no faster. If stages call collectives, there is no limit, because devices wait for each other.
    """
    if not (plan.keeping.recomputes and plan.program.is_independent and grid.first.is_cpu):
        return nullcontext()
    return threading.Semaphore(len(os.sched_getaffinity(0)))


class _ReplicaStep(ReplicaRun):
    """One local replica in the steps of a pipeline.

    Attributes:
        drive: The threads of the last step.
    """

    def __init__(
        self, plan: StagePlan, grid: DeviceGrid, position: int, at_once: AbstractContextManager[object]
    ) -> None:
        super().__init__(len(plan.buckets))
        self._plan = plan
        self._at_once = at_once
        self._is_cpu = grid.first.is_cpu
        self._devices = [column.device_of(position) for column in grid.columns]
        self._instruments = grid.first.instruments
        self._number = grid.replicas[position]
        self._of_segment = {bucket.segment: (number, bucket) for number, bucket in enumerate(plan.buckets)}

    def prepare(self, variables: Sequence[jax.Array], arguments: Sequence[Tree], others: Tree, begin_s: float) -> None:
        """Take the arguments of a step.

        Args:
            variables: The variables, flat.
            arguments: Batch, index, control words, and residuals with the replica's own model state.
            others: The model state of all replicas, with None for leaves that each replica has for itself.
            begin_s: The time when the step begins.
        """
        plan = self._plan
        for finished in self.finished:
            finished.clear()
        if self.is_broken:  # there are no buffers yet, or only some of the donated ones are left
            plan.executables(self._devices)  # compile here, before several threads ask for them
            self._replica = ReplicaStages(plan.staged, plan.stages, plan.timetable.mapping, self._devices, plan.keeping)
            layouts = [*((bucket.segment, bucket.layout) for bucket in plan.buckets), (None, plan.state_layout)]
            self.buffers = [self._zeros(segment, layout) for segment, layout in layouts]
        self.is_broken = False
        batch, self._index, self._control, (_, own) = arguments
        state = plan.program.rule.with_own(others, [borrow(one)[0] for one in own])
        rows = [borrow(leaf) if self._is_cpu else leaf for leaf in jax.tree.leaves(batch)]
        self._replica.prepare(plan.arguments.given(variables, rows, self._index, self._control, state))
        self._flags: dict[int, jax.Array] = {}
        self.drive = Drive(plan.course, begin_s, short_s=SHORT_S if plan.program.is_independent else 0.0)

    def _zeros(self, segment: int | None, layout: FlatLayout) -> tuple[jax.Array, ...]:
        device = self._devices[0 if segment is None else self._plan.device_of(segment)]
        return tuple(
            jax.device_put(np.zeros(buffer.size, buffer.dtype), device, may_alias=False) for buffer in layout.buffers
        )

    @property
    def outputs(self) -> list[Tree]:
        """The outputs of each micro-batch."""
        return self._replica.outputs_of(self._plan.outputs)

    def follow(self, device: int) -> None:
        """Run all actions of a device, in this thread."""
        try:
            self.drive.follow(device, self._perform, self._at_once)
        except BaseException:
            self.is_broken = True
            for finished in self.finished:
                finished.set()
            raise

    def _perform(self, device: int, action: StageAction) -> None:
        self._instruments.replica_begins(self._number, action.stage)
        self._carry_out(device, action)
        self._instruments.replica_ends(self._number, action.stage, action.micro_batch or 0)

    def _carry_out(self, device: int, action: StageAction) -> None:
        if action.kind is not ActionKind.UPDATE:
            self._replica.perform(device, action)
            return
        for segment in self._replica.segments_of(device, action.stage):
            if segment in self._of_segment:
                self._finish(*self._of_segment[segment], self._devices[device])

    def _finish(self, number: int, bucket: StageBucket, device: jax.Device) -> None:
        sums = [self._sum(segment, place, device) for sums in bucket.sums for segment, place in sums]
        made = jax.block_until_ready(self._plan.finish(bucket, device)(*sums, *self.buffers[number]))
        count = len(bucket.layout.buffers)
        self.buffers[number] = made[:count]
        if self._plan.program.needs_flags:
            self._flags[number] = made[count]
        self.finished[number].set()

    def _sum(self, segment: int, place: int, device: jax.Device) -> jax.Array:
        found = self._replica.sums[segment]
        if found is None:  # no loss depends on its weights
            found = self._plan.stages[segment].zeros(device)
        return back_on(found[place], device) if self._plan.keeping.offloads_sums else found[place]

    @override
    def wait(self, number: int) -> Sequence[jax.Array]:
        """Wait for a bucket. The last one, without gradients, is computed after all devices have ended."""
        plan, device = self._plan, self._devices[0]
        *_, state, (total,) = plan.arguments.places
        carried = self._replica.carried
        flags = [self._flags[number] for number in range(len(plan.buckets))] if plan.program.needs_flags else []
        values = [carried[total], self._index, self._control, *(carried[place] for place in state), *flags]
        values = [jax.device_put(value, device) if isinstance(value, jax.Array) else value for value in values]
        made = jax.block_until_ready(plan.end(device)(*values, *self.buffers[number]))
        count = len(plan.state_layout.buffers)
        self.buffers[number] = made[:count]
        self.kept = list(made[count:])
        self._replica.release()
        return self.buffers[number]
