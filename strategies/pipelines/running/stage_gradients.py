"""The programs of a pipeline, and the gradients that a thread for each device of each replica computes."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from typing_extensions import override

from strategies.exchange.flat import FlatLayout, Shards
from strategies.exchange.means import Allocate
from strategies.jax.comparing.agreement import lines_of
from strategies.jax.gradients.gradient_programs import (
    GradientLayout,
    LeavingBucket,
    ReplicaGradients,
    ReplicaPlan,
    StashMemory,
    flatten,
    zeros_for,
)
from strategies.jax.replicas.devices import DeviceGrid, borrow
from strategies.pipelines.running.arguments import Arguments
from strategies.pipelines.running.driver import SHORT_S, ScheduleGraph, ScheduleRunner, begin_devices, raise_first
from strategies.pipelines.running.stage_programs import (
    PASSES,
    Accumulators,
    Executables,
    MicroBatchOutputs,
    ReplicaStages,
    Shape,
    Staged,
    StagePrograms,
    StashPolicy,
    back_on,
)
from strategies.pipelines.timetable import ActionKind, StageAction, Timed, Timetable
from strategies.typing import Tree, Variables


@dataclass(frozen=True)
class StageBucket:
    """The gradients that are sent together, after a segment.

    Attributes:
        segment: The number of the segment.
        gradient_layout: The numbers of the gradients, and their layout in buffers.
        sums: For each gradient, the accumulators to be added, each as (segment, place among the segment's weights).
    """

    segment: int
    gradient_layout: LeavingBucket
    sums: tuple[tuple[tuple[int, int], ...], ...]


Watch = Callable[[Mapping[int, Sequence[Timed]]], None]
"""Gets, after each step, the timed actions of each local replica's devices."""

Take = Callable[[Mapping[int, Sequence[Tree]]], None]
"""Gets, after each step, the outputs of each local replica's micro-batches."""


@final
@dataclass(eq=False)
class PipelinePlan(ReplicaPlan):
    """The programs of the stages, and the programs that send gradients, loss, metrics and model state from a replica.

    A gradient leaves with the first segment that uses its variable, as the sum over all segments that use it; these are
    on one device. Buckets leave in the order of their completion: the last stage's first. The last bucket has all
    values that are no gradients.

    Attributes:
        executables_of: The compiled functions of the pipeline.
        arguments: The arguments of a replica's computation.
        closed: The computation for a micro-batch.
        staged: The same computation, cut into stages.
        timetable: The actions of each device.
        shards: The division of the mean gradients; None for whole ones.
        keeping: The values that are kept of micro-batches.
        outputs: The outputs of each micro-batch.
        watch: Gets the timed actions after each step, or None.
        take: Gets the outputs after each step, or None.
        groups: The gradients that leave together, in the order in which they leave.
        last: The bucket of the values that are no gradients.
        schedule_graph: The graph of the timetable.
        stages: The programs of the segments.
    """

    executables_of: Executables
    arguments: Arguments
    closed: core.ClosedJaxpr
    staged: Staged
    timetable: Timetable
    shards: Shards | None
    keeping: StashPolicy
    outputs: MicroBatchOutputs
    watch: Watch | None
    take: Take | None

    def __post_init__(self) -> None:
        self.program = program = self.arguments.program
        staged, options, gradients = self.staged, program.options, program.num_gradients
        shapes = {
            place: jax.ShapeDtypeStruct(staged.arguments[place].shape, dtype)
            for place, dtype in zip(staged.weights, program.gradient_dtypes, strict=True)
        }
        rules = options.method, program.num_micro_batches, options.map_gradient
        sums = Accumulators(shapes, *rules, program.needs_flags)
        for leaf, place in enumerate(staged.weights):
            if options.map_gradient is not None and len(staged.readers(place)) > 1:
                raise ValueError(
                    f"map_gradient needs the whole gradient of a micro-batch, but variable {leaf} is used by several "
                    "stages, each of which has a part of it; use it in one stage only, or leave map_gradient out"
                )
        count = len(staged.segments)
        self.stages = [StagePrograms(staged, number, sums, self.executables_of) for number in range(count)]
        of_stages = [each for stage in self.stages for each in stage.sum_shapes]
        self.sum_bytes = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in of_stages)
        self.gradient_layout = GradientLayout(tuple(program.results), self.shards, len(program.results) - gradients)
        self.groups: list[StageBucket] = []
        for number in reversed(range(count)):
            if leaves := self._leaves_of(number):
                self.groups.append(self._group(number, leaves))
        self.last = self.gradient_layout.bucket(
            "gradients/tail", range(gradients, len(program.results)), program.places.size
        )
        self.buckets = [*(group.gradient_layout for group in self.groups), self.last]
        self.schedule_graph = ScheduleGraph.of(self.timetable)
        self._found: dict[tuple[int, jax.Device], jax.stages.Compiled] = {}

    # ---- gradients that leave with a segment

    def _leaves_of(self, number: int) -> list[int]:
        """Return the numbers of the gradients that leave with a segment; with the first also those of no segment."""
        weights = enumerate(self.staged.weights)
        return [leaf for leaf, place in weights if (self.staged.readers(place) or [0])[0] == number]

    def _group(self, number: int, leaves: Sequence[int]) -> StageBucket:
        sums = tuple(
            tuple((reader, self.stages[reader].weights.index(place)) for reader in self.staged.readers(place))
            for place in (self.staged.weights[leaf] for leaf in leaves)
        )
        return StageBucket(number, self.gradient_layout.bucket(f"gradients/{len(self.groups)}", leaves, 0), sums)

    @override
    @cached_property
    def lines(self) -> Sequence[str]:
        # Gradients are mapped in the programs of stages only.
        return [line for closed in (self.closed, *(stage.closed for stage in self.stages)) for line in lines_of(closed)]

    @override
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> StageGradients:
        return StageGradients(self, grid, allocate, failed)

    # ---- programs

    @override
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the programs of the passes of stages, and of the end of a step."""
        return self.compiled([column.device_of(0) for column in grid.columns])

    @override
    def kept(self, grid: DeviceGrid) -> Sequence[StashMemory]:
        """Return the memory that each stage needs between passes, besides its arguments."""
        nbytes = [0] * self.timetable.num_stages
        for number, (stage, _) in enumerate(self.staged.homes):
            device = grid.columns[self.device_of(number)].device_of(0)
            nbytes[stage] += self.stages[number].kept_bytes(device, self.keeping.runs_again(number))
        return [StashMemory(stage, self.timetable.stash(stage), of_stage) for stage, of_stage in enumerate(nbytes)]

    def compiled(self, devices: Sequence[jax.Device]) -> dict[str, jax.stages.Compiled]:
        """Return all programs for the devices of a replica, by description; compiled on the first call."""
        found: dict[str, jax.stages.Compiled] = {}
        for number, stage in enumerate(self.stages):
            of_passes = zip(PASSES, stage.compiled(devices[self.device_of(number)]), strict=True)
            found |= {f"{self._named(number)}, {name}": one for name, one in of_passes if one is not None}
        for bucket in self.groups:
            found[f"{self._named(bucket.segment)}, sums"] = self.finish(bucket, devices[self.device_of(bucket.segment)])
        return {**found, "end of the step": self.end(devices[0])}

    def _named(self, number: int) -> str:
        stage, place = self.staged.homes[number]
        return f"stage {stage}" if len(self.staged.stages[stage]) == 1 else f"stage {stage}, segment {place}"

    def device_of(self, number: int) -> int:
        """Return the device of a segment."""
        stage, place = self.staged.homes[number]
        return self.timetable.mapping[stage][place]

    def finish(self, bucket: StageBucket, device: jax.Device) -> jax.stages.Compiled:
        """Return the program `(*accumulators, *buffers) -> (*buffers, which gradients are not finite)`."""
        key = (bucket.segment, device)
        if key not in self._found:
            shapes = [self.stages[segment].sum_shapes[place] for sums in bucket.sums for segment, place in sums]
            self._found[key] = self._compiled(device, self._finishing(bucket), shapes, bucket.gradient_layout.layout)
        return self._found[key]

    def end(self, device: jax.Device) -> jax.stages.Compiled:
        """Return the program `(sum of values, index, control, *model state, *which are not finite, *buffers) -> ...`.

        It returns the buffers, and the leaves of the model state that the replica keeps.
        """
        key = (-1, device)
        if key not in self._found:
            like = self.arguments.like
            shapes = [like[6], like[3], like[4], *jax.tree.leaves(like[5])]
            if self.program.needs_flags:
                shapes += [jax.ShapeDtypeStruct((len(bucket.sums),), np.bool_) for bucket in self.groups]
            self._found[key] = self._compiled(device, self._ending, shapes, self.last.layout)
        return self._found[key]

    def _compiled(
        self,
        device: jax.Device,
        function: Callable[..., tuple[jax.Array, ...]],
        shapes: Sequence[Shape],
        layout: FlatLayout,
    ) -> jax.stages.Compiled:
        buffers = [jax.ShapeDtypeStruct((buffer.size,), buffer.dtype) for buffer in layout.buffers]
        donated = range(len(shapes), len(shapes) + len(buffers))
        return self.executables_of.compiled(device, function, [*shapes, *buffers], donated)

    def _finishing(self, bucket: StageBucket) -> Callable[..., tuple[jax.Array, ...]]:
        count = sum(map(len, bucket.sums))

        def finishing(*values: jax.Array) -> tuple[jax.Array, ...]:
            rest = list(values[:count])
            leaves = []
            for leaf, sums in zip(bucket.gradient_layout.leaves, bucket.sums, strict=True):
                own, rest = rest[: len(sums)], rest[len(sums) :]
                result = self.program.results[leaf]
                total = sum(own[1:], start=own[0]) if own else jnp.zeros(result.shape, result.dtype)
                leaves.append(total.astype(result.dtype))
            buffers = flatten(bucket.gradient_layout.layout, leaves, None, values[count:])
            return (*buffers, self.program.not_finite(leaves)) if self.program.needs_flags else buffers

        return finishing

    def _ending(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        program = self.program
        total, index, control, *rest = values
        state, rest = rest[: len(program.rule.reductions)], rest[len(program.rule.reductions) :]
        is_bad = None
        if program.needs_flags:
            flags, rest = rest[: len(self.groups)], rest[len(self.groups) :]
            order = np.argsort([leaf for bucket in self.groups for leaf in bucket.gradient_layout.leaves])
            is_bad = jnp.concatenate(flags)[order]
        tail = program.tail(total / program.num_micro_batches, index, control, is_bad)
        after = jax.tree.unflatten(program.rule.structure, state)
        means, kept = program.of_state(after)
        return (*flatten(self.last.layout, means, tail, rest), *kept)


# ---- gradients


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
        at_once = _at_once(plan, grid)
        runs = [_ReplicaStep(plan, grid, position, at_once) for position in range(len(grid.replicas))]
        super().__init__(plan, allocate, runs)

    @override
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        wait(self._begun)  # for a step that was given up
        flat = jax.tree.leaves(variables)
        begin_s = time.perf_counter()
        for run, arguments in zip(self._runs, of_replicas, strict=True):
            run.prepare(flat, arguments, others, begin_s)
        columns = self._grid.columns[: len(self._plan.timetable.devices)]
        self._begun = begin_devices(columns, lambda device, position: self._runs[position].follow(device), self._failed)

    @override
    def _await(self, number: int) -> None:
        if number == len(self.buckets) - 1:
            self._end()
            for run in self._runs:
                run.end()
            return
        for run in self._runs:
            run.finished[number].wait()
            if run.is_broken:
                self._end()

    def _end(self) -> None:
        """Wait until all threads have ended, and forget them; raise the error of a replica."""
        begun, self._begun = self._begun, []
        raise_first(begun)
        runs = dict(zip(self._grid.replicas, self._runs, strict=True))
        if self._plan.watch is not None:
            self._plan.watch({replica: run.runner.spans for replica, run in runs.items()})
        if self._plan.take is not None:
            self._plan.take({replica: run.outputs for replica, run in runs.items()})


def _at_once(plan: PipelinePlan, grid: DeviceGrid) -> AbstractContextManager[object]:
    """Return a context that limits how many devices compute at once: one per core, if memory is to be saved.

    Values that a stage recomputes exist while its backward pass runs. More devices than cores would hold more of them
    at once, and be no faster. If stages call collectives, there is no limit, because devices wait for each other.
    """
    if not (plan.keeping.recomputes and plan.program.is_independent and grid.first.is_cpu):
        return nullcontext()
    return threading.Semaphore(len(os.sched_getaffinity(0)))


class _ReplicaStep:
    """One local replica in the steps of a pipeline.

    Attributes:
        buffers: The buffers of each bucket; a step reuses the memory of the previous one.
        kept: The values kept for the next step.
        finished: An event for each bucket that a thread finishes: its buffers are ready, or never will be.
        is_broken: Whether the replica's programs have raised, or have not run yet; then the buffers are made anew.
        runner: The threads of the last step.
    """

    def __init__(
        self, plan: PipelinePlan, grid: DeviceGrid, position: int, at_once: AbstractContextManager[object]
    ) -> None:
        self.buffers: list[Sequence[jax.Array]] = []
        self.kept: list[jax.Array] = []
        self.finished = [threading.Event() for _ in plan.groups]
        self.is_broken = True
        self._plan = plan
        self._at_once = at_once
        self._is_cpu = grid.first.is_cpu
        self._devices = [column.device_of(position) for column in grid.columns]
        self._instruments = grid.first.instruments
        self._number = grid.replicas[position]
        self._of_segment = {bucket.segment: (number, bucket) for number, bucket in enumerate(plan.groups)}

    def prepare(self, variables: Sequence[jax.Array], arguments: Sequence[Tree], others: Tree, begin_s: float) -> None:
        """Take the arguments of a step.

        Args:
            variables: The variables, flat.
            arguments: Batch, index, control words, and the replica's own model state.
            others: The model state of all replicas, with None for leaves that each replica has for itself.
            begin_s: The time when the step begins.
        """
        plan = self._plan
        for finished in self.finished:
            finished.clear()
        if self.is_broken:  # there are no buffers yet, or only some of the donated ones are left
            plan.compiled(self._devices)  # compile here, before several threads ask for them
            self._replica = ReplicaStages(plan.staged, plan.stages, plan.timetable.mapping, self._devices, plan.keeping)
            places = [*(plan.device_of(bucket.segment) for bucket in plan.groups), 0]
            layouts = [*(bucket.gradient_layout.layout for bucket in plan.groups), plan.last.layout]
            devices = [self._devices[place] for place in places]
            self.buffers = list(map(zeros_for, layouts, devices))
        self.is_broken = False
        batch, self._index, self._control, own = arguments
        state = plan.program.rule.with_own(others, [borrow(one)[0] for one in own])
        rows = [borrow(leaf) if self._is_cpu else leaf for leaf in jax.tree.leaves(batch)]
        self._replica.prepare(plan.arguments.given(variables, rows, self._index, self._control, state))
        self._flags: dict[int, jax.Array] = {}
        self.runner = ScheduleRunner(
            plan.schedule_graph, begin_s, short_s=SHORT_S if plan.program.is_independent else 0.0
        )

    @property
    def outputs(self) -> list[Tree]:
        """The outputs of each micro-batch."""
        return self._replica.outputs_of(self._plan.outputs)

    def follow(self, device: int) -> None:
        """Run all actions of a device, in this thread."""
        try:
            self.runner.follow(device, self._perform, self._at_once)
        except BaseException:
            self.is_broken = True
            for finished in self.finished:
                finished.set()
            raise

    def _perform(self, device: int, action: StageAction) -> None:
        self._instruments.replica_begins(self._number, action.stage)
        if action.kind is ActionKind.UPDATE:
            for segment in self._replica.segments_of(device, action.stage):
                if segment in self._of_segment:
                    self._finish(*self._of_segment[segment], self._devices[device])
        else:
            self._replica.perform(device, action)
        self._instruments.replica_ends(self._number, action.stage, action.micro_batch or 0)

    def _finish(self, number: int, bucket: StageBucket, device: jax.Device) -> None:
        sums = [self._sum(segment, place, device) for sums in bucket.sums for segment, place in sums]
        made = jax.block_until_ready(self._plan.finish(bucket, device)(*sums, *self.buffers[number]))
        count = len(bucket.gradient_layout.layout.buffers)
        self.buffers[number] = made[:count]
        if self._plan.program.needs_flags:
            self._flags[number] = made[count]
        self.finished[number].set()

    def _sum(self, segment: int, place: int, device: jax.Device) -> jax.Array:
        found = self._replica.sums[segment]
        if found is None:  # no loss depends on its weights
            found = self._plan.stages[segment].zeros(device)
        return back_on(found[place], device) if self._plan.keeping.offloads_sums else found[place]

    def end(self) -> None:
        """Compute the last bucket, after all devices have ended."""
        plan, device = self._plan, self._devices[0]
        *_, state, (total,) = plan.arguments.places
        carried = self._replica.carried
        flags = [self._flags[number] for number in range(len(plan.groups))] if plan.program.needs_flags else []
        values = [carried[total], self._index, self._control, *(carried[place] for place in state), *flags]
        values = [jax.device_put(value, device) if isinstance(value, jax.Array) else value for value in values]
        made = jax.block_until_ready(plan.end(device)(*values, *self.buffers[-1]))
        count = len(plan.last.layout.buffers)
        self.buffers[-1] = made[:count]
        self.kept = list(made[count:])
        self._replica.release()
