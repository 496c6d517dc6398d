"""The compiled programs of the local replicas' gradients, the buffers in which gradients leave, and copies from a GPU.

Gradients leave the programs that compute them flat, one buffer per dtype.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from typing_extensions import override

from collectives import Communicator
from collectives.cuda.device import CudaDevice
from collectives.errors import CudaError, MappingError
from collectives.instruments import Instruments, is_seen
from strategies.exchange.flat import FlatLayout, Shards
from strategies.exchange.host_copies import HostCopies, HostSums, PendingCopies, Source
from strategies.exchange.means import Allocate, Bucket
from strategies.exchange.window_path import gpu_of
from strategies.jax.comparing.agreement import lines_of
from strategies.jax.gradients.replica_program import ReplicaProgram, ReplicaShapes
from strategies.jax.programs.jaxpr import every_equation
from strategies.jax.replicas.devices import DeviceGrid, ReplicaDevices, borrow, results_of
from strategies.jax.replicas.replicas import Replicas
from strategies.typing import Leaf, Tree, Variables

logger = logging.getLogger("strategies.jax")

SHORT_S = 200e-6
"""The longest program, in seconds, for which replicas take turns although there are more cores. XLA runs the programs
that one thread dispatches one after another. A thread per replica costs 50 to 170 us of CPU time (measured with 8 and
32 replicas on 2 cores), so programs of 170 us end at the same time either way."""
TRIED = 3
"""The number of steps in turns after which a program may count as long. The shortest of them counts, because another
process may delay a step."""


@final
class SerialDispatch:
    """The choice between one thread for all replicas' programs and a thread for each. Bits are the same.

    Args:
        may_wait: Returns whether replicas need threads, because the program of one may wait for another.
        instruments: Instruments; one that sees each replica begin and end needs threads.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        may_wait: Callable[[], bool],
        instruments: Instruments,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._may_wait = may_wait
        self._instruments = instruments
        self._clock = clock
        self._may_be_serial: bool | None = None  # unknown before the first step: the program is not traced yet
        self._has_one_core = len(os.sched_getaffinity(0)) == 1
        self._shortest_s = float("inf")
        self._tried = 0
        self._began_s = 0.0

    def begin(self) -> bool:
        """Begin a step; return whether the replicas take turns."""
        if self._may_be_serial is None:
            self._may_be_serial = not (is_seen(self._instruments.replica_begins) or self._may_wait())
        self._began_s = self._clock()
        is_short = self._tried < TRIED or self._shortest_s <= SHORT_S
        return self._may_be_serial and (self._has_one_core or is_short)

    def end(self, replicas: int) -> None:
        """End a step in which the replicas took turns.

        Args:
            replicas: Number of local replicas.
        """
        self._tried += 1
        self._shortest_s = min(self._shortest_s, (self._clock() - self._began_s) / replicas)


def may_wait(closed: core.ClosedJaxpr) -> bool:
    """Return whether a program has calls of Python or of foreign functions, which may wait for another replica's."""
    return bool(closed.effects) or any(
        "callback" in equation.primitive.name or equation.primitive.name in ("debug_print", "ffi_call")
        for equation in every_equation(closed.jaxpr)
    )


# ---- the layout of gradients in flat buffers, and copies from a GPU


@dataclass(frozen=True)
class GradientLayout:
    """The layout of gradients, and of other values to be averaged over replicas.

    Attributes:
        leaves: Shapes and dtypes of the gradients, followed by other values that are averaged like them.
        shards: Division of the means that have their own buffer; this instance then gets only its part. None for whole
            means.
        whole: Number of last leaves that are never cut into shards.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    shards: Shards | None = None
    whole: int = 0

    def bucket(self, name: str, leaves: Sequence[int], tail: int) -> LeavingBucket:
        """Return the layout of some leaves, by their numbers, in flat buffers, with a tail of `tail` values."""
        multiple = self.shards.replicas if self.shards else 1
        return LeavingBucket(name, tuple(leaves), FlatLayout.of([self.leaves[leaf] for leaf in leaves], tail, multiple))

    def _sizes(self, leaves: Sequence[int]) -> dict[int, int]:
        """Return the size of this instance's shard of each sharded gradient, by position in a bucket of `leaves`."""
        if self.shards is None:
            return {}
        sizes = self.shards.sizes([self.leaves[leaf] for leaf in leaves])
        return {place: size for place, size in sizes.items() if leaves[place] < len(self.leaves) - self.whole}

    def memory(self, buckets: Sequence[LeavingBucket], allocate: Allocate) -> tuple[list[Bucket], list[np.ndarray]]:
        """Return the buckets with memory for the means, and the means of all leaves in that memory.

        A mean that is cut into shards is represented by this instance's part, in its shape.
        """
        made, means = [], {}
        for bucket in buckets:
            made.append(Bucket.of(bucket.name, bucket.layout, allocate, self._sizes(bucket.leaves), {}))
            for place, leaf in enumerate(bucket.leaves):
                mean = made[-1].mean(place)
                if self.shards is not None and bucket.layout.buffer_of(place) in made[-1].scattered:
                    mean = mean.reshape(self.shards.shape(self.leaves[leaf]))
                means[leaf] = mean
        return made, [means[leaf] for leaf in range(len(self.leaves))]


@dataclass(frozen=True)
class LeavingBucket:
    """Values that leave a replica together.

    Attributes:
        name: Name of the collectives.
        leaves: Numbers of the values among all values that leave.
        layout: Places of these values in flat buffers.
    """

    name: str
    leaves: tuple[int, ...]
    layout: FlatLayout


def flatten(
    layout: FlatLayout, leaves: Sequence[jax.Array], tail: jax.Array | None, into: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Write leaves, and the tail if any, into buffers in the order of `layout.buffers`; traceable. Gaps are zero."""
    written = list(into)
    # Written one by one: XLA:CPU turns a concatenation into an element-wise loop, and fuses the code that produced its
    # parts into that loop (measured: 50 times slower than the gradients themselves).
    for leaf, (number, start) in zip(jax.lax.optimization_barrier(leaves), layout.places, strict=True):
        flat = leaf.reshape(-1)
        is_alone = number > 0 and flat.size == written[number].size
        written[number] = flat if is_alone else jax.lax.dynamic_update_slice(written[number], flat, (start,))
    if tail is not None:
        written[0] = jax.lax.dynamic_update_slice(written[0], tail, (written[0].size - layout.tail,))
    return tuple(written)


def zeros_for(layout: FlatLayout, device: jax.Device) -> tuple[jax.Array, ...]:
    """Return new buffers of zeros on a device."""
    zeros = (np.zeros(buffer.size, buffer.dtype) for buffer in layout.buffers)
    return tuple(jax.device_put(each, device, may_alias=False) for each in zeros)


def copies_for(devices: ReplicaDevices, communicator: Communicator, buckets: Sequence[Bucket]) -> GradientCopies | None:
    """Return copies of gradients by the CUDA driver, or None if JAX copies them. Collective on GPUs.

    Args:
        devices: Devices of the replicas; the first one makes the update.
        communicator: Communicator of the instances.
        buckets: Buckets with memory for the means.
    """
    if devices.is_cpu:
        return None
    found = None
    try:
        found = GradientCopies(gpu_of(devices.devices[0].local_hardware_id), buckets)
    except CudaError as error:
        logger.warning("JAX copies gradients to the host and back, which is slow: %s", error)
    if communicator.size > 1 and communicator.mechanism == "window":
        said = np.array([len(devices.replicas), found is not None])
        counts, have_copies = communicator.all_gather(said, name="gradients are copied by the CUDA driver").T
        if found is not None and have_copies.all():
            found.share(communicator, counts.tolist())
    return found


class GradientCopies:
    """The copies of the gradients of one kind of step.

    Args:
        device: GPU that makes the update.
        buckets: Buckets of the gradients.

    Raises:
        CudaError: The GPU has too little memory for the means.
    """

    def __init__(self, device: CudaDevice, buckets: Sequence[Bucket]) -> None:
        self._copies = HostCopies(device)
        self._buckets = buckets
        self._sums: list[HostSums | None] = [None] * len(buckets)
        self._means = self._copies.means(result for bucket in buckets for result in bucket.results)
        self._imported: dict[tuple[int, tuple[int, ...]], jax.Array] = {}

    def share(self, communicator: Communicator, counts: Sequence[int]) -> None:
        """Share memory in which instances of one host add each other's gradients, if there is enough. Collective.

        Args:
            communicator: Communicator of the instances.
            counts: Number of local replicas of each instance.
        """
        try:
            self._sums = [HostSums(communicator, counts, bucket.layout.buffers) for bucket in self._buckets]
        except MappingError as error:
            logger.info("gradients are added through the window of the collectives: %s", error)

    def fetch(self, number: int, of_buffers: Sequence[Sequence[jax.Array]]) -> PendingCopies:
        """Begin to copy a bucket to the host; each mean is copied back as soon as it is known.

        Args:
            number: Number of the bucket.
            of_buffers: Finished arrays of the local replicas, for each buffer.
        """
        sources = [[_source(array) for array in of_replicas] for of_replicas in of_buffers]
        return self._copies.fetch(number, sources, lambda buffer, mean: self._means.begin(mean), self._sums[number])

    def means(self, means: Tree) -> Tree:
        """Wait for the means on the GPU and return them; means that were not copied stay on the host.

        The next step overwrites them, so a program must not take over (donate) their memory.
        """
        self._means.wait()
        return jax.tree.map(self._on_device, means)

    def _on_device(self, mean: np.ndarray) -> Leaf:
        key = mean.__array_interface__["data"][0], mean.shape
        if key not in self._imported:
            exported = self._means.on_device(mean) if mean.size else None
            if exported is None:
                return mean
            self._imported[key] = jax.dlpack.from_dlpack(exported, copy=False)
        return self._imported[key]


def _source(array: jax.Array) -> Source:
    return Source(array.unsafe_buffer_pointer(), array.size, np.dtype(array.dtype))


class HostViews:
    """The views of a replica's buffers of one bucket.

    A step donates each buffer to its successor, so it mostly lies where it lay in the last step. Then its last view is
    returned. Another one takes 20 us, when caches are cold.

    Example::

        views = HostViews()
        views.of(run.buffers, 0)  # NumPy arrays in the memory of run.buffers[0]
    """

    def __init__(self) -> None:
        self._are_lent: bool | None = None
        self._addresses: list[int] = []
        self._views: Sequence[np.ndarray] = ()

    def of(self, buckets: Sequence[Sequence[jax.Array]], number: int) -> Sequence[np.ndarray]:
        """Return read-only arrays in the memory of finished buffers; on a device other than the CPU, copies.

        Args:
            buckets: Buffers of all buckets. Views keep this list alive, and so the memory of what it holds by then.
            number: Number of the bucket.
        """
        buffers = buckets[number]
        if self._are_lent is None:
            self._are_lent = all(buffer.size and _is_on_cpu(buffer) for buffer in buffers)
        if not self._are_lent:
            return [borrow(buffer) for buffer in buffers]
        addresses = [buffer.unsafe_buffer_pointer() for buffer in buffers]
        if addresses != self._addresses:
            pairs = zip(buffers, addresses, strict=True)
            self._views = [_view(buffer, address, buckets) for buffer, address in pairs]
            self._addresses = addresses
        return self._views


class _ArrayInterface:
    """Memory of a buffer, for NumPy's array interface (version 3).

    Args:
        address: Address of its first byte.
        nbytes: Size in bytes.
        owner: Object that keeps the memory alive.
    """

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, True), "version": 3}


def _view(buffer: jax.Array, address: int, owner: object) -> np.ndarray:
    return np.asarray(_ArrayInterface(address, buffer.nbytes, owner)).view(np.dtype(buffer.dtype))


def _is_on_cpu(buffer: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in buffer.devices())


# ---- programs of replicas of any kind


class ReplicaRun(Protocol):
    """The computation of one local replica in a step.

    Attributes:
        buffers: Buffers of each bucket; a step reuses the memory of the previous one.
        kept: Values kept for the next step.
    """

    buffers: list[Sequence[jax.Array]]
    kept: list[jax.Array]


class ReplicaGradients(ABC):
    """The gradients of all local replicas, computed bucket by bucket.

    For each step the engine calls `dispatch`, reads `collect` to its end, and then `kept` and `means`. If `collect`
    raises, all programs have ended, and the next `dispatch` begins a new step.

    Args:
        plan: Programs of a replica.
        allocate: Function that makes memory for the means.
        runs: Computation of each local replica.

    Attributes:
        buckets: Buckets of the values that leave the replicas, in the order in which they are ready.
        means: Means of these values, once all buckets have been reduced. A mean that is cut into shards is represented
            by this instance's part, in its shape.
        tail: Mean tail, once the last bucket has been reduced.
        copies: Copies of gradients from a GPU to the host; None if JAX makes them.
    """

    def __init__(self, plan: ReplicaPlan, allocate: Allocate, runs: Sequence[ReplicaRun]) -> None:
        self.buckets, self.means = plan.gradient_layout.memory(plan.buckets, allocate)
        self.tail: np.ndarray = self.buckets[-1].layout.tail_view(self.buckets[-1].results)
        self.copies: GradientCopies | None = None
        self._runs = runs
        self._begun: list[Future[None]] = []
        self._views = [[HostViews() for _ in self.buckets] for _ in runs]

    @abstractmethod
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        """Begin to compute the gradients, without waiting for them.

        Args:
            variables: Variables on the first device; not to be used up before all buckets are collected.
            of_replicas: Arguments of the gradient function that each local replica has for itself.
            others: Last arguments of the gradient function, which all replicas share; on the device of the variables.
        """

    @abstractmethod
    def _await(self, number: int) -> None:
        """Wait until all replicas have finished a bucket; for the last one, until all programs have ended.

        Raises:
            BaseException: The error of a replica's program, after all programs have ended.
        """

    def collect(self) -> Iterator[tuple[Bucket, Sequence[Sequence[np.ndarray]]]]:
        """Yield each bucket when it is ready, with the arrays of the local replicas for each of its buffers.

        On GPUs with `copies`, arrays may still be being copied; taking one from the sequence waits for it.

        Raises:
            BaseException: The error of a replica's program, after all programs have ended.
        """
        for number, bucket in enumerate(self.buckets):
            self._await(number)
            if self.copies is not None:
                buffers = zip(*(run.buffers[number] for run in self._runs), strict=True)
                yield bucket, self.copies.fetch(number, list(buffers))
                continue
            views = [of[number].of(run.buffers, number) for of, run in zip(self._views, self._runs, strict=True)]
            yield bucket, list(zip(*views, strict=True))

    def kept(self) -> list[list[jax.Array]]:
        """Return the values that each local replica keeps for its next step, once all buckets are collected."""
        return [run.kept for run in self._runs]


@dataclass(frozen=True)
class StashMemory:
    """The memory that the devices of a stage need between the passes of a step.

    Attributes:
        stage: Number of the stage.
        micro_batches: Largest number of micro-batches kept at once.
        nbytes: Size of one micro-batch's values in bytes, at most.
    """

    stage: int
    micro_batches: int
    nbytes: int


class ReplicaPlan(ABC):
    """The programs of a replica's gradients, independent of the number of local replicas, without memory for gradients.

    The preparation of a step compares `lines` between instances, and calls `gradients_on`. If the local replicas
    change, it calls `gradients_on` again. A plan holds no state of steps, so errors in steps leave it usable.

    Attributes:
        program: Computation of a replica.
        gradient_layout: Layout of the values to be averaged over replicas.
        buckets: Values that travel together, the first finished ones first.
        sum_bytes: Size of a replica's accumulators of micro-batches, besides the memory of its programs.
        is_on_device: Whether gradients stay on the device.
    """

    program: ReplicaProgram
    gradient_layout: GradientLayout
    buckets: Sequence[LeavingBucket]
    sum_bytes: int
    is_on_device: bool = False

    @abstractmethod
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the compiled programs of a replica, by names; the first call compiles them."""

    def kept(self, grid: DeviceGrid) -> Sequence[StashMemory]:
        """Return the memory that each stage needs between the passes of a micro-batch; empty without a pipeline."""
        return ()

    @property
    @abstractmethod
    def lines(self) -> Sequence[str]:
        """The lines of all programs that depend on the user's functions, see `lines_of`.

        They have the constants that the programs had when they were first asked for.
        """

    @abstractmethod
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> ReplicaGradients:
        """Return the computation of the local replicas' gradients on their devices.

        Args:
            grid: Devices of the replicas.
            allocate: Function that makes memory for results.
            failed: Callback with the error of a replica's program, while other replicas may wait for that replica.
        """


class PipelinePlanner(Protocol):
    """The interface of options that cut a replica into stages; `strategies.Pipelining` implements it."""

    @property
    def terms(self) -> Mapping[str, object]:
        """The options that must be equal on all instances."""

    def plan(
        self, replicas: Replicas, program: ReplicaProgram, shapes: ReplicaShapes, shards: Shards | None
    ) -> ReplicaPlan:
        """Return the programs of the stages. Called once for each new shape of a batch, on all instances.

        Args:
            replicas: Places of the replicas.
            program: Computation of a replica.
            shapes: Shapes of a replica's arguments.
            shards: Division of the mean gradients; None for whole ones.

        Raises:
            ValueError: The program cannot be cut into these stages.
        """


# ---- one program per replica


@final
class JaxGradientPlan(ReplicaPlan):
    """The plan of gradients by one program per replica; all gradients come at its end.

    Args:
        devices: Devices of the replicas; the plan depends on their kind only, not on their number.
        program: Computation of one replica.
        shapes: Shapes of its arguments.
        shards: Division of the means, see `GradientLayout`.
        is_on_device: Whether gradients stay on the device, in buffers that the program makes; otherwise they leave it
            in the memory of its last arguments.

    Attributes:
        layout: Layout of the gradients in buffers.
    """

    def __init__(
        self,
        devices: ReplicaDevices,
        program: ReplicaProgram,
        shapes: Sequence[Tree],
        shards: Shards | None,
        is_on_device: bool = False,
    ) -> None:
        averaged = program.results
        self.program = program
        self.is_on_device = is_on_device
        self.gradient_layout = GradientLayout(tuple(averaged), shards, len(averaged) - program.num_gradients)
        self.buckets = [self.gradient_layout.bucket("gradients", range(len(averaged)), program.places.size)]
        self.layout = self.buckets[0].layout
        self.sum_bytes = 0  # micro-batches are added inside of the program
        leaves, self._structure = jax.tree.flatten(tuple(shapes))
        self._inputs = len(leaves)
        into = [] if is_on_device else self.layout.buffers
        self._shapes = [*leaves, *(jax.ShapeDtypeStruct((buffer.size,), buffer.dtype) for buffer in into)]
        self._compiler = devices.compile(self._of_one_replica, range(self._inputs, len(self._shapes)))
        self._executables: dict[jax.Device, jax.stages.Compiled] = {}

    def _of_one_replica(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        tail, *results = self.program(*jax.tree.unflatten(self._structure, values[: self._inputs]))
        averaged = len(self.gradient_layout.leaves)
        into = values[self._inputs :] or [jnp.zeros(buffer.size, buffer.dtype) for buffer in self.layout.buffers]
        return (*flatten(self.layout, results[:averaged], tail, into), *results[averaged:])

    @override
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        return {"gradients": self.compiled(grid.first.device_of(0))}

    def compiled(self, device: jax.Device) -> jax.stages.Compiled:
        """Return the executable on a device; the first call compiles it."""
        if device not in self._executables:
            self._executables[device] = self._compiler.compiled(device, *self._shapes)
        return self._executables[device]

    @override
    @cached_property
    def lines(self) -> Sequence[str]:
        return lines_of(self.equations())

    def equations(self) -> core.ClosedJaxpr:
        """Return the computation of a replica."""
        return self._compiler.equations(*self._shapes)

    def may_wait(self) -> bool:
        """Return whether replicas need a thread each, because their programs may wait for each other."""
        equations = self.equations()  # tracing shows whether the program has collectives
        return not self.program.is_independent or may_wait(equations)

    @override
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> GradientPrograms:
        """Return the computation on the first device of each replica."""
        return GradientPrograms(grid.first, self, allocate, failed)


@final
class GradientPrograms(ReplicaGradients):
    """The gradients of all local replicas, computed by one program per replica.

    Args:
        devices: Devices of the local replicas.
        plan: Plan of the program.
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
        runs = [_ReplicaGradientRun(devices, plan.layout, position) for position in range(len(devices.replicas))]
        super().__init__(plan, allocate, runs)
        self.plan = plan
        self._devices = devices
        self._failed = failed
        self._dispatch = SerialDispatch(lambda: not devices.is_cpu or plan.may_wait(), devices.instruments)
        self._is_serial = False

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
        self._is_serial = len(self._runs) > 1 and self._dispatch.begin()
        if self._is_serial or len(self._runs) == 1:
            for run in self._runs:
                run.dispatch()
        else:
            self._begun = self._devices.begin(lambda position: self._runs[position].compute(), self._failed)

    @override
    def _await(self, number: int) -> None:
        if self._begun:
            begun, self._begun = self._begun, []
            results_of(begun)
            return
        failed: BaseException | None = None
        for run in self._runs:  # this thread has dispatched them
            try:
                run.wait()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed
        if self._is_serial:
            self._dispatch.end(len(self._runs))


class _ReplicaGradientRun:
    """One local replica's program.

    Args:
        devices: Devices of the local replicas.
        layout: Layout of the gradients in buffers.
        position: Position of the replica among the local ones.
    """

    def __init__(self, devices: ReplicaDevices, layout: FlatLayout, position: int) -> None:
        self.buffers: list[Sequence[jax.Array]] = []
        self.kept: list[jax.Array] = []
        self._devices = devices
        self._layout = layout
        self._position = position
        self._is_broken = True  # the program has raised, or has not run yet: buffers are made anew
        self._arguments: Sequence[Tree] = ()

    def prepare(self, arguments: Sequence[Tree], executable: jax.stages.Compiled) -> None:
        self._arguments, self._executable = arguments, executable
        if self._is_broken:  # there are no buffers yet, or a failed program has used up some
            self.buffers = [zeros_for(self._layout, self._devices.device_of(self._position))]
        self._is_broken = False

    def dispatch(self) -> None:
        """Start the program on the device, without waiting."""
        arguments, self._arguments = self._arguments, ()
        count = len(self._layout.buffers)
        try:
            results = self._executable(*arguments, *self.buffers[0])
        except BaseException:
            self._is_broken = True
            raise
        self.buffers[0], self.kept = results[:count], list(results[count:])

    def wait(self) -> None:
        """Wait until the program has ended."""
        try:
            for result in (*self.buffers[0], *self.kept):
                result.block_until_ready()
        except BaseException:
            self._is_broken = True
            raise

    def compute(self) -> None:
        """Run the program in this thread."""
        instruments, replica = self._devices.instruments, self._devices.replicas[self._position]
        instruments.replica_begins(replica, 0)
        self.dispatch()
        self.wait()
        instruments.replica_ends(replica, 0, 0)
