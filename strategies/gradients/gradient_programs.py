"""The compiled programs behind the gradients of the local replicas, and the buffers in which gradients leave them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import final

import jax
import numpy as np
from jax.extend import core

from strategies.exchange.flat import LARGE_BYTES, FlatLayout
from strategies.exchange.means import Allocate, Bucket
from strategies.exchange.shards import Shards
from strategies.gradients.computation import Kept, ReplicaGradients, ReplicaPlan
from strategies.gradients.leaving import TAIL, Leaving, MeansMemory, flatten
from strategies.programs.buckets import cut_in_buckets
from strategies.programs.program import DeviceProgram
from strategies.programs.segments import Part, ProgramSegment, carry_out
from strategies.replicas.devices import DeviceGrid, ReplicaDevices, borrow, is_key
from strategies.typing import Tree, Variables

logger = logging.getLogger(__name__)

BUCKET_BYTES = LARGE_BYTES
"""Gradients travel as soon as so many bytes are finished. (Over 200 Mbit/s a message of 1 MiB takes 42 ms, what
precedes it 2 to 5 ms.)"""

GradientFunction = Callable[..., Sequence[jax.Array]]


@final
class JaxGradientPlan(ReplicaPlan):
    """The compiled programs behind the gradients, and how these will lie in buffers; has no such memory itself.

    With one segment all gradients come at the end. With several, XLA computes the later ones while the earlier ones
    are on their way.

    Args:
        devices: where replicas run; on as many others of the same kind the plan is the same.
        function: `(variables, batch, replica index, control words, *kept, shared) -> (tail, *gradients, *kept)` of one
            replica; what it keeps is for its next step, what is shared is the same for all of them.
        shapes: of its arguments.
        gradients: the shapes and dtypes in which they leave the function, and others behind them that are averaged
            like them.
        streams: whether to cut it into segments.
        tail: how many values the tail has.
        shards: how the means of gradients that have a buffer alone are cut, of which this instance gets its part only;
            None for whole means. A gradient that travels in pieces is not cut, nor are others of its bucket.
        whole: how many of the last gradients are never cut into shards.
        kept: how many arrays a replica keeps.

    Attributes:
        segments: the parts of the function.
        layouts: for each segment how the gradients that it finishes lie in buffers.
        kept_counts: for each segment how many arrays that it finishes a replica keeps.
        programs: compute the segments.
    """

    def __init__(
        self,
        devices: ReplicaDevices,
        function: GradientFunction,
        shapes: Sequence[Tree],
        gradients: Sequence[jax.ShapeDtypeStruct],
        streams: bool,
        tail: int,
        shards: Shards | None = None,
        whole: int = 0,
        kept: int = 0,
    ) -> None:
        self._leaving = Leaving(tuple(gradients), shards, whole)
        self._shapes = jax.tree.leaves(shapes)
        self._executables: dict[jax.Device, list[jax.stages.Compiled]] = {}
        results = TAIL + 1 + len(gradients) + kept
        self.segments = self._cut(function, shapes, results) if streams else [_uncut(function, shapes, results)]
        self.layouts = [
            self.leaving.layout(segment.parts, tail if segment is self.segments[-1] else 0) for segment in self.segments
        ]
        self.kept_counts = [len(self.of_kept(segment.parts)) for segment in self.segments]
        pairs = zip(self.segments, self.layouts, strict=True)
        self.programs = [self._program(devices, segment, layout) for segment, layout in pairs]

    @property
    def leaving(self) -> Leaving:
        """See `ReplicaPlan`."""
        return self._leaving

    def buckets(self, memory: MeansMemory) -> list[Bucket]:
        """See `ReplicaPlan`: one for each segment."""
        return [
            memory.bucket("gradients" if len(self.segments) == 1 else f"gradients/{number}", segment.parts, layout)
            for number, (segment, layout) in enumerate(zip(self.segments, self.layouts, strict=True))
        ]

    @property
    def sum_bytes(self) -> int:
        """See `ReplicaPlan`: micro-batches are added inside of the program."""
        return 0

    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """See `ReplicaPlan`: of the segments."""
        compiled = self.compiled(grid.first.device_of(0))
        count = len(compiled)
        return {
            "gradients" if count == 1 else f"gradients, part {n + 1} of {count}": one for n, one in enumerate(compiled)
        }

    def kept(self, grid: DeviceGrid) -> Sequence[Kept]:
        """See `ReplicaPlan`: none."""
        return ()

    def _cut(self, function: GradientFunction, shapes: Sequence[Tree], results: int) -> list[ProgramSegment]:
        """Segments, each of which finishes some gradients; only one where the function calls back into Python.

        JAX hands the arguments of a callback over on the device, behind the segments that wait there for the callback.
        """
        closed = jax.make_jaxpr(function)(*shapes)
        if closed.effects:
            logger.info("gradients are not streamed: the loss function calls back, as an all_reduce of its own does")
            return [_uncut(function, shapes, results)]
        early = range(TAIL + 1, TAIL + 1 + len(self.leaving.leaves))
        return cut_in_buckets(closed, early, BUCKET_BYTES, LARGE_BYTES)

    def compiled(self, device: jax.Device) -> list[jax.stages.Compiled]:
        """Return the executables of the segments on a device; compiled when they are asked for first."""
        if device not in self._executables:
            self._executables[device] = self._compile(device)
        return self._executables[device]

    def equations(self) -> core.ClosedJaxpr:
        """See `ReplicaPlan`: what the first segment computes; where there is no other one that is everything."""
        inputs = [self._shapes[place] for place in self.segments[0].inputs]
        return self.programs[0].equations(*inputs, *self._buffers(0))

    def _compile(self, device: jax.Device) -> list[jax.stages.Compiled]:
        """Carry out the segments with shapes instead of arrays."""
        found: dict[int, jax.stages.Compiled] = {}

        def compute(number: int, given: list[Tree]) -> Sequence[Tree]:
            found[number] = self.programs[number].compiled(device, *given, *self._buffers(number))
            made = jax.tree.leaves(found[number].out_info)
            return [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in made]

        for _ in carry_out(self.segments, self._shapes, compute):
            pass
        return [found[number] for number in range(len(self.segments))]

    def _buffers(self, number: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the buffers of a segment."""
        return [jax.ShapeDtypeStruct((buffer.size,), buffer.dtype) for buffer in self.layouts[number].buffers]

    def of_kept(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the results of a segment that the replica keeps for its next step."""
        return tuple(part for part in parts if part.result > TAIL + len(self.leaving.leaves))

    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> GradientPrograms:
        """See `ReplicaPlan`: on the first device of each."""
        return GradientPrograms(grid.first, self, allocate, failed)

    def _program(self, devices: ReplicaDevices, segment: ProgramSegment, layout: FlatLayout) -> DeviceProgram:
        first_buffer = len(segment.inputs) + len(segment.takes)

        def of_one_replica(*values: jax.Array) -> tuple[jax.Array, ...]:
            results = segment.function(*values[:first_buffer])
            finished = dict(zip(segment.parts, results, strict=False))
            gradients = [finished[part] for part in self.leaving.of_gradients(segment.parts)]
            buffers = flatten(layout, gradients, finished.get(Part(TAIL)), values[first_buffer:])
            kept = [finished[part] for part in self.of_kept(segment.parts)]
            return (*buffers, *kept, *results[len(segment.parts) :])

        return devices.compile(of_one_replica, range(first_buffer, first_buffer + len(layout.buffers)))


@final
class GradientPrograms(ReplicaGradients):
    """Computes the gradients of all local replicas, bucket by bucket.

    Args:
        devices: where the local replicas run.
        plan: the programs that do it.
        allocate: makes memory for results.
        failed: called with what a replica's program raises, when others may be waiting for it.
    """

    def __init__(
        self,
        devices: ReplicaDevices,
        plan: JaxGradientPlan,
        allocate: Allocate,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.plan = plan
        self._devices = devices
        self._failed = failed
        self._memory = MeansMemory(plan.leaving, allocate)
        self.buckets = plan.buckets(self._memory)
        self._parts = [plan.leaving.of_gradients(segment.parts) for segment in plan.segments]  # in each bucket
        self._runs = [_ReplicaGradientRun(devices, plan, position) for position in range(len(devices.replicas))]
        self._begun: list[Future[None]] = []

    @property
    def means(self) -> list[np.ndarray]:
        """See `ReplicaGradients`."""
        return self._memory.means

    @property
    def tail(self) -> np.ndarray:
        """See `ReplicaGradients`."""
        return self.buckets[-1].layout.tail_view(self.buckets[-1].results)

    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        """See `ReplicaGradients`."""
        wait(self._begun)  # of a step that was given up
        shared = [[jax.tree.leaves(tree) for tree in trees] for trees in self._devices.share((variables, others))]
        for position, run in enumerate(self._runs):
            first, last = shared[position % len(shared)]
            arguments = [*first, *jax.tree.leaves(of_replicas[position]), *last]
            run.prepare(arguments, self.plan.compiled(self._devices.device_of(position)))
        if len(self._runs) == 1:
            self._runs[0].dispatch()
        else:
            self._begun = self._devices.begin(lambda position: self._runs[position].compute(), self._failed)

    def kept(self) -> list[list[jax.Array]]:
        """See `ReplicaGradients`."""
        return [run.kept for run in self._runs]

    def collect(self) -> Iterator[tuple[Bucket, list[list[np.ndarray]]]]:
        """See `ReplicaGradients`."""
        for number, bucket in enumerate(self.buckets):
            contributions: list[list[np.ndarray]] = [[] for _ in bucket.results]
            for run in self._runs:
                for of_buffer, array in zip(contributions, self._finished(run, number), strict=True):
                    of_buffer.append(borrow(array))
            if bucket is self.buckets[-1]:
                self._end()
            yield bucket, contributions

    def _finished(self, run: _ReplicaGradientRun, number: int) -> Sequence[jax.Array]:
        """Return the buffers of a segment, when a replica has computed it."""
        if not self._begun:
            return run.wait(number)
        run.finished[number].wait()
        if run.is_broken:
            self._end()
        return run.buffers[number]

    def _end(self) -> None:
        """Wait until all replicas have ended; raises what the first of them has raised."""
        begun, self._begun = self._begun, []
        errors = [future.exception() for future in begun]
        for error in errors:
            if error is not None:
                raise error

    def leaves(self) -> list[list[np.ndarray]]:
        """See `ReplicaGradients`."""
        found: list[dict[Part, np.ndarray]] = [{} for _ in self._devices.replicas]
        for of_bucket, (bucket, contributions) in zip(self._parts, self.collect(), strict=True):
            for parts, buffers in zip(found, zip(*contributions, strict=True), strict=True):
                parts.update(zip(of_bucket, bucket.layout.views(buffers), strict=True))
                if bucket is self.buckets[-1]:
                    parts[Part(TAIL)] = bucket.layout.tail_view(buffers)
        kept = [
            [np.asarray(jax.random.key_data(one) if is_key(one) else one) for one in run.kept] for run in self._runs
        ]
        return [[*self._put_together(parts), *own] for parts, own in zip(found, kept, strict=True)]

    def _put_together(self, parts: Mapping[Part, np.ndarray]) -> list[np.ndarray]:
        ordered = sorted(parts, key=lambda part: (part.result, part.rows or (0, 0)))
        grouped = itertools.groupby(ordered, key=lambda part: part.result)
        return [np.concatenate([parts[part].reshape(-1) for part in group]) for _, group in grouped]


class _ReplicaGradientRun:
    """The computations of one local replica.

    Attributes:
        buffers: of each segment; what one step has left there, the next one takes over.
        finished: for each segment whether its buffers are ready, or never will be.
        is_broken: whether its program has raised something, or has not run yet.
        kept: for the next step.
    """

    def __init__(self, devices: ReplicaDevices, plan: JaxGradientPlan, position: int) -> None:
        self._devices = devices
        self._plan = plan
        self._position = position
        self._arguments: Sequence[Tree] = ()
        self._executables: Sequence[jax.stages.Compiled] = ()
        self.buffers: list[Sequence[jax.Array]] = []
        self.finished = [threading.Event() for _ in plan.segments]
        self.is_broken = True
        self.kept: list[jax.Array] = []

    def prepare(self, arguments: Sequence[Tree], executables: Sequence[jax.stages.Compiled]) -> None:
        """Take what is to be computed with.

        Args:
            arguments: of the gradient function, flat.
            executables: of the segments.
        """
        self._arguments, self._executables = arguments, executables
        for finished in self.finished:
            finished.clear()
        if self.is_broken:  # no buffers yet, or what is left of donated ones
            self.buffers = [
                tuple(self._devices.zeros(self._position, buffer.size, buffer.dtype) for buffer in layout.buffers)
                for layout in self._plan.layouts
            ]
        self.is_broken = False

    def dispatch(self) -> None:
        """Have the device compute all segments; does not wait for it."""
        for _ in self._carry_out():
            pass

    def wait(self, number: int) -> Sequence[jax.Array]:
        """Return the buffers of a segment that was dispatched, when they are ready."""
        try:
            ready: Sequence[jax.Array] = jax.block_until_ready(self.buffers[number])
        except BaseException:
            self.is_broken = True
            raise
        return ready

    def compute(self) -> None:
        """Compute all segments, in this thread."""
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
        """Yield the number of each segment with its results, when it is dispatched."""
        arguments, self._arguments = self._arguments, ()
        return carry_out(self._plan.segments, arguments, self._compute)

    def _compute(self, number: int, given: list[jax.Array]) -> Sequence[jax.Array]:
        count = len(self.buffers[number])
        results: Sequence[jax.Array] = self._executables[number](*given, *self.buffers[number])
        self.buffers[number] = results[:count]
        if kept := self._plan.kept_counts[number]:
            self.kept = list(results[count : count + kept])
        return results


def _uncut(function: GradientFunction, shapes: Sequence[Tree], results: int) -> ProgramSegment:
    """Return the whole program as one segment."""
    leaves, structure = jax.tree.flatten(tuple(shapes))

    def flat(*values: jax.Array) -> Sequence[jax.Array]:
        return function(*jax.tree.unflatten(structure, values))

    return ProgramSegment(flat, tuple(range(len(leaves))), (), (), tuple(map(Part, range(results))))
