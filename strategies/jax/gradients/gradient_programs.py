"""The compiled programs of the local replicas' gradients, and the buffers in which gradients leave them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import final

import jax
import jax.numpy as jnp
from jax.extend import core
from typing_extensions import override

from strategies.exchange.flat import LARGE_BYTES, FlatLayout
from strategies.exchange.means import Allocate, Bucket
from strategies.exchange.shards import Shards
from strategies.jax.gradients.computation import ReplicaGradients, ReplicaPlan, ReplicaRun
from strategies.jax.gradients.leaving import TAIL, Leaving, MeansMemory, flatten
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.gradients.taking_turns import TakingTurns, may_wait
from strategies.jax.programs.buckets import cut_in_buckets
from strategies.jax.programs.program import DeviceProgram
from strategies.jax.programs.segments import Part, ProgramSegment, carry_out
from strategies.jax.replicas.devices import DeviceGrid, ReplicaDevices, results_of
from strategies.typing import Tree, Variables

logger = logging.getLogger(__name__)

BUCKET_BYTES = LARGE_BYTES
"""The number of finished bytes after which gradients travel. Over 200 Mbit/s a message of 1 MiB takes 42 ms, and its
preparation 2 to 5 ms."""


@final
class JaxGradientPlan(ReplicaPlan):
    """The plan of gradients by one program per replica, which may be cut into segments.

    With one segment all gradients come at the end. With several, earlier gradients travel while XLA computes later
    ones.

    Args:
        devices: Devices of the replicas; the plan depends on their kind only, not on their number.
        program: Computation of one replica.
        shapes: Shapes of its arguments.
        streams: Whether to cut it into segments.
        shards: Division of the means, see `Leaving`.
        makes_buffers: Whether the programs make the buffers in which gradients leave them; otherwise they take over
            the memory of their last arguments.

    Attributes:
        segments: Parts of the program.
        layouts: Layout, for each segment, of the gradients that it finishes.
        kept_counts: Number of arrays, for each segment, that it finishes and the replica keeps.
        programs: Compiled programs of the segments.
    """

    def __init__(
        self,
        devices: ReplicaDevices,
        program: ReplicaProgram,
        shapes: Sequence[Tree],
        streams: bool,
        shards: Shards | None,
        makes_buffers: bool = False,
    ) -> None:
        averaged = program.results
        self._makes_buffers = makes_buffers
        self._traced = program
        self.leaving = Leaving(tuple(averaged), shards, len(averaged) - program.num_gradients)
        self.sum_bytes = 0  # micro-batches are added inside of the program
        self._shapes = jax.tree.leaves(shapes)
        self._executables: dict[jax.Device, list[jax.stages.Compiled]] = {}
        results = TAIL + 1 + len(averaged) + program.num_kept
        self.segments = self._cut(program, shapes, results) if streams else [_uncut(program, shapes, results)]
        tails = [0] * (len(self.segments) - 1) + [program.places.size]
        self.layouts = [
            self.leaving.layout(segment.parts, tail) for segment, tail in zip(self.segments, tails, strict=True)
        ]
        self.kept_counts = [len(self._of_kept(segment.parts)) for segment in self.segments]
        pairs = zip(self.segments, self.layouts, strict=True)
        self.programs = [self._program(devices, segment, layout) for segment, layout in pairs]

    @override
    def buckets(self, memory: MeansMemory) -> list[Bucket]:
        """Return one bucket for each segment."""
        return [
            memory.bucket("gradients" if len(self.segments) == 1 else f"gradients/{number}", segment.parts, layout)
            for number, (segment, layout) in enumerate(zip(self.segments, self.layouts, strict=True))
        ]

    @override
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the compiled segments, by names."""
        compiled = self.compiled(grid.first.device_of(0))
        count = len(compiled)
        return {
            "gradients" if count == 1 else f"gradients, part {n + 1} of {count}": one for n, one in enumerate(compiled)
        }

    def _cut(self, program: ReplicaProgram, shapes: Sequence[Tree], results: int) -> list[ProgramSegment]:
        """Return segments that each finish some gradients; only one if the function calls back into Python.

        JAX passes the arguments of a callback through the device, behind the segments that wait there for the callback.
        """
        closed = jax.make_jaxpr(program)(*shapes)
        if closed.effects:
            logger.info("gradients are not streamed: the loss function calls back into Python, as all_reduce does")
            return [_uncut(program, shapes, results)]
        early = range(TAIL + 1, TAIL + 1 + len(self.leaving.leaves))
        return cut_in_buckets(closed, early, BUCKET_BYTES, LARGE_BYTES)

    def compiled(self, device: jax.Device) -> list[jax.stages.Compiled]:
        """Return the executables of the segments on a device; the first call compiles them."""
        if device not in self._executables:
            self._executables[device] = self._compile(device)
        return self._executables[device]

    @override
    def equations(self) -> core.ClosedJaxpr:
        """Return the computation of the first segment, which is everything if it is the only one."""
        inputs = [self._shapes[place] for place in self.segments[0].inputs]
        return self.programs[0].equations(*inputs, *self._buffers(0))

    def may_wait(self) -> bool:
        """Return whether replicas need a thread each: their programs may wait for each other, or are streamed."""
        if len(self.segments) > 1:  # the first bucket shall not wait for the last replica
            return True
        equations = self.equations()  # tracing shows whether the program has collectives
        return not self._traced.is_independent or may_wait(equations)

    def _compile(self, device: jax.Device) -> list[jax.stages.Compiled]:
        """Compile the segments in order, with shapes instead of arrays."""
        found: dict[int, jax.stages.Compiled] = {}

        def compute(number: int, given: list[Tree]) -> Sequence[Tree]:
            found[number] = self.programs[number].compiled(device, *given, *self._buffers(number))
            made = jax.tree.leaves(found[number].out_info)
            return [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in made]

        for _ in carry_out(self.segments, self._shapes, compute):
            pass
        return [found[number] for number in range(len(self.segments))]

    def _buffers(self, number: int) -> list[jax.ShapeDtypeStruct]:
        if self._makes_buffers:
            return []
        return [jax.ShapeDtypeStruct((buffer.size,), buffer.dtype) for buffer in self.layouts[number].buffers]

    def _of_kept(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the results of a segment that the replica keeps for its next step."""
        return tuple(part for part in parts if part.result > TAIL + len(self.leaving.leaves))

    @override
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> GradientPrograms:
        """Return the computation on the first device of each replica."""
        return GradientPrograms(grid.first, self, allocate, failed)

    def _program(self, devices: ReplicaDevices, segment: ProgramSegment, layout: FlatLayout) -> DeviceProgram:
        first_buffer = len(segment.inputs) + len(segment.takes)

        def of_one_replica(*values: jax.Array) -> tuple[jax.Array, ...]:
            results = segment.function(*values[:first_buffer])
            finished = dict(zip(segment.parts, results, strict=False))
            gradients = [finished[part] for part in self.leaving.of_gradients(segment.parts)]
            into = values[first_buffer:] or [jnp.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers]
            buffers = flatten(layout, gradients, finished.get(Part(TAIL)), into)
            kept = [finished[part] for part in self._of_kept(segment.parts)]
            return (*buffers, *kept, *results[len(segment.parts) :])

        donated = () if self._makes_buffers else range(first_buffer, first_buffer + len(layout.buffers))
        return devices.compile(of_one_replica, donated)


@final
class GradientPrograms(ReplicaGradients):
    """The gradients of all local replicas, computed by one program per replica.

    Args:
        devices: Devices of the local replicas.
        plan: Plan of the programs.
        allocate: Function that makes memory for results.
        failed: Callback with the error of a replica's program, while other replicas may wait for that replica.
    """

    _runs: Sequence[_ReplicaGradientRun]

    def __init__(
        self,
        devices: ReplicaDevices,
        plan: JaxGradientPlan,
        allocate: Allocate,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        memory = MeansMemory(plan.leaving, allocate)
        runs = [_ReplicaGradientRun(devices, plan, position) for position in range(len(devices.replicas))]
        parts = [plan.leaving.of_gradients(segment.parts) for segment in plan.segments]
        super().__init__(memory, plan.buckets(memory), parts, runs)
        self.plan = plan
        self._devices = devices
        self._failed = failed
        self._turns = TakingTurns(lambda: not devices.is_cpu or plan.may_wait(), devices.instruments)
        self._are_in_turn = False

    @override
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        wait(self._begun)  # threads of a step that was given up
        shared = self._devices.share((jax.tree.leaves(variables), jax.tree.leaves(others)))
        executables = [self.plan.compiled(device) for device in self._devices.devices]
        width = len(executables)
        for position, run in enumerate(self._runs):
            first, last = shared[position % width]
            arguments = [*first, *jax.tree.leaves(of_replicas[position]), *last]
            run.prepare(arguments, executables[position % width])
        self._are_in_turn = len(self._runs) > 1 and self._turns.begin()
        if self._are_in_turn or len(self._runs) == 1:
            for run in self._runs:
                run.dispatch()
        else:
            for run in self._runs:
                run.begin()
            self._begun = self._devices.begin(lambda position: self._runs[position].compute(), self._failed)

    def _end(self) -> None:
        if self._begun:
            begun, self._begun = self._begun, []
            results_of(begun)
        elif self._are_in_turn:
            self._end_turns()

    def _end_turns(self) -> None:
        """Wait for the programs that this thread has dispatched; raise the error of the first one that failed."""
        failed: BaseException | None = None
        for run in self._runs:
            try:
                run.wait(0)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed
        self._turns.end(len(self._runs))


class _ReplicaGradientRun(ReplicaRun):
    def __init__(self, devices: ReplicaDevices, plan: JaxGradientPlan, position: int) -> None:
        super().__init__(len(plan.segments))
        self._devices = devices
        self._plan = plan
        self._position = position
        self._arguments: Sequence[Tree] = ()
        self._executables: Sequence[jax.stages.Compiled] = ()

    def prepare(self, arguments: Sequence[Tree], executables: Sequence[jax.stages.Compiled]) -> None:
        self._arguments, self._executables = arguments, executables
        if self.is_broken:  # there are no buffers yet, or a failed program has used up some
            self.buffers = [
                tuple(self._devices.zeros(self._position, buffer.size, buffer.dtype) for buffer in layout.buffers)
                for layout in self._plan.layouts
            ]
        self.is_broken = False

    def begin(self) -> None:
        """Note that no bucket is finished, before a thread computes."""
        for finished in self.finished:
            finished.clear()

    def dispatch(self) -> None:
        """Start all segments on the device, without waiting."""
        try:
            for _ in self._carry_out():
                pass
        except BaseException:
            self.is_broken = True
            raise

    @override
    def wait(self, number: int) -> Sequence[jax.Array]:
        try:
            for buffer in self.buffers[number]:
                buffer.block_until_ready()
        except BaseException:
            self.is_broken = True
            raise
        return self.buffers[number]

    def compute(self) -> None:
        """Compute all segments in this thread."""
        instruments, replica = self._devices.instruments, self._devices.replicas[self._position]
        instruments.replica_begins(replica, 0)
        try:
            for number, results in self._carry_out():
                jax.block_until_ready(results)
                instruments.replica_ends(replica, 0, number)
                self.finished[number].set()
        except BaseException:
            self.is_broken = True
            raise
        finally:
            for finished in self.finished:
                finished.set()

    def _carry_out(self) -> Iterator[tuple[int, Sequence[jax.Array]]]:
        """Yield the number and the results of each segment when it is dispatched."""
        arguments, self._arguments = self._arguments, ()
        return carry_out(self._plan.segments, arguments, self._compute)

    def _compute(self, number: int, given: list[jax.Array]) -> Sequence[jax.Array]:
        count = len(self.buffers[number])
        results: Sequence[jax.Array] = self._executables[number](*given, *self.buffers[number])
        self.buffers[number] = results[:count]
        if kept := self._plan.kept_counts[number]:
            self.kept = list(results[count : count + kept])
        return results


def _uncut(program: ReplicaProgram, shapes: Sequence[Tree], results: int) -> ProgramSegment:
    leaves, structure = jax.tree.flatten(tuple(shapes))

    def flat(*values: jax.Array) -> Sequence[jax.Array]:
        return program(*jax.tree.unflatten(structure, values))

    return ProgramSegment(flat, tuple(range(len(leaves))), (), (), tuple(map(Part, range(results))))
