"""Pipelines without an optimizer: forward passes only, on all local replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from strategies.jax.programs.jaxpr import Graph
from strategies.jax.replicas.devices import DeviceGrid
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.replicas.replicas import Replicas
from strategies.pipelines.marks import cut_in_stages, refuse_other_shards
from strategies.pipelines.pipelining import refuse_captured, refuse_what_meets
from strategies.pipelines.running.driver import Course, Drive, begin_devices, raise_first
from strategies.pipelines.running.micro_batch import MicroBatch, tracing
from strategies.pipelines.running.replica_run import MicroBatchOutputs, ReplicaStages, StepArguments
from strategies.pipelines.running.stage_gradients import Watch
from strategies.pipelines.running.stage_programs import Executables, StagePrograms
from strategies.pipelines.running.staged import Accumulators, StageArray, Staged
from strategies.pipelines.timetable import Timetable
from strategies.typing import Tree, Variables


class Inference:
    """The stages of a function of variables and elements, compiled for given shapes.

    Args:
        replicas: Replicas that run the stages.
        function: `(variables, elements) -> outputs`, with marks of stages; elements are flat.
        variables: Variables, for their structure, shapes and dtypes.
        elements: Shapes of the arrays of one micro-batch.
        timetable: Work of each device in each time slot.
        widths: Number of functions of each stage.
        watch: Function called after each run with the timed work of each local replica's devices.

    Raises:
        ValueError: If the function cannot be cut into these stages.
    """

    def __init__(
        self,
        replicas: Replicas,
        function: Callable[[Variables, Sequence[jax.Array]], Tree],
        variables: Variables,
        elements: Sequence[jax.ShapeDtypeStruct],
        timetable: Timetable,
        widths: Sequence[int],
        watch: Watch,
    ) -> None:
        self._watch = watch
        self._replicas = replicas
        self._timetable = timetable
        leaves, structure = jax.tree.flatten(variables)

        def traced(*flat: jax.Array) -> Tree:
            *values, number, index = flat
            context = replicas.new_context(index, "pipeline", is_watched=True)
            with replica_context(context), tracing(MicroBatch(number)):
                out = function(jax.tree.unflatten(structure, values[: len(leaves)]), values[len(leaves) :])
            refuse_what_meets(context.has_feeds, context.is_independent, timetable)
            return jax.tree.map(jnp.asarray, out)

        scalar = jax.ShapeDtypeStruct((), np.int32)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (*leaves, *elements)] + [scalar, scalar]
        closed, outputs = jax.make_jaxpr(traced, return_shape=True)(*shapes)
        refuse_captured(closed)
        varying = frozenset(range(len(leaves), len(shapes) - 1))
        graph = Graph.of(closed)
        refuse_other_shards(graph, timetable.mapping)
        self._staged = Staged(cut_in_stages(graph, widths), tuple(shapes), varying=varying)
        self._outputs = MicroBatchOutputs(jax.tree.structure(outputs), range(len(jax.tree.leaves(outputs))))
        executables = Executables(replicas.devices.compile)
        numbers = range(len(self._staged.segments))
        self._programs = [StagePrograms(self._staged, number, Accumulators(), executables) for number in numbers]
        self._course = Course.of(timetable)

    def __call__(
        self, variables: Variables, elements: Sequence[Sequence[Sequence[StageArray]]]
    ) -> Mapping[int, Sequence[Tree]]:
        """Return for each local replica the outputs of its micro-batches.

        Raises:
            BaseException: The exception that a stage has raised.
        """
        begin_s, grid = time.perf_counter(), self._replicas.grid  # the grid grows when instances are lost
        runs = [self._run(grid, position, variables, own, begin_s) for position, own in enumerate(elements)]

        def follow(device: int, position: int) -> None:
            run, drive = runs[position]
            drive.follow(device, run.perform)

        columns = grid.columns[: len(self._timetable.devices)]
        raise_first(begin_devices(columns, follow, self._replicas.reducer.fail))
        of_replicas = dict(zip(grid.replicas, runs, strict=True))
        self._watch({replica: drive.spans for replica, (_, drive) in of_replicas.items()})
        return {replica: run.outputs_of(self._outputs) for replica, (run, _) in of_replicas.items()}

    def _run(
        self,
        grid: DeviceGrid,
        position: int,
        variables: Variables,
        elements: Sequence[Sequence[StageArray]],
        begin_s: float,
    ) -> tuple[ReplicaStages, Drive]:
        devices = [column.device_of(position) for column in grid.columns]
        run = ReplicaStages(self._staged, self._programs, self._timetable.mapping, devices)
        number = len(self._staged.arguments) - 2
        leaves = jax.tree.leaves(variables)
        each: dict[int, Sequence[StageArray]] = dict(enumerate(zip(*elements, strict=True), len(leaves)))
        each[number] = [np.int32(micro_batch) for micro_batch in range(self._timetable.num_micro_batches)]
        lasting = dict(enumerate(leaves))
        lasting[number + 1] = np.int32(grid.replicas[position])
        run.prepare(StepArguments(lasting, each, {}))
        return run, Drive(self._course, begin_s)
