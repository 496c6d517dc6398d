"""The devices and threads that run an instance's replicas."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import strategies.trees as trees
from collectives.instruments import COMPILE, Instruments
from popdist.xla import POOL_VARIABLE, fix_thread_pool, thread_pool_size
from strategies.jax.programs.compilation import use_executable_cache
from strategies.jax.programs.program import DeviceProgram
from strategies.jax.programs.xla_pitfalls import (
    insist_on_right_sums,
    refuse_cut_integers,
    use_right_sums,
    warn_of_little_address_space,
)
from strategies.late_jax import is_jax_array, jax, jnp
from strategies.typing import Function, Leaf, Tree

T = TypeVar("T")

logger = logging.getLogger(__name__)

THREADS = "replica"
"""The beginning of the names of threads that run replicas."""
_UNSEEN = Instruments()
_HOST_DEVICES_FLAG = "xla_force_host_platform_device_count"


@dataclass(frozen=True)
class ReplicaDevices:
    """The devices of the local replicas, which run `width` at a time, in one wave or several.

    A replica's program is compiled for a single device and knows neither its neighbours nor their number. On CPUs all
    replicas share one device and one executable, which one thread per replica runs.

    Attributes:
        devices: Devices of the replicas of a wave; on CPUs one device for all.
        replicas: Global indices of the local replicas.
        executables: Folder of compiled programs; None to compile them at every start.
        instruments: Instruments that are told of compilations and of replicas at work.
    """

    devices: tuple[jax.Device, ...]
    replicas: range
    executables: Path | None = None
    instruments: Instruments = field(default_factory=Instruments, repr=False, compare=False)

    @property
    def width(self) -> int:
        """The number of replicas that run at once."""
        return len(self.devices)

    @property
    def waves(self) -> int:
        """The number of waves in one step of all local replicas."""
        return len(self.replicas) // self.width

    @property
    def is_lockstep(self) -> bool:
        """Whether all local replicas run at once, so that they can wait for each other."""
        return self.waves == 1

    @property
    def is_cpu(self) -> bool:
        """Whether replicas run on the host's processor."""
        return bool(self.devices[0].platform == "cpu")

    def device_of(self, position: int) -> jax.Device:
        """Return the device of the local replica at this position."""
        return self.devices[position % self.width]

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.width, THREADS)

    def compile(self, function: Function, donated: Sequence[int] = ()) -> DeviceProgram:
        """Return the program of one replica, which all of them run.

        Args:
            function: Computation of a replica.
            donated: Positions of arguments whose memory the results may take over.
        """
        from strategies.jax.replicas.callbacks import in_order  # imports JAX

        return DeviceProgram(in_order(function), self.executables, donated, self.instruments.during[COMPILE])

    def begin(
        self, work: Callable[[int], T], failed: Callable[[BaseException], None] = lambda error: None
    ) -> list[Future[T]]:
        """Start `work` for each local replica in threads, for `width` of them at once.

        Args:
            work: Function of the position of a local replica.
            failed: Callback with an error of `work`, called at once, because other replicas may wait for that one.
        """

        def attempt(position: int) -> T:
            try:
                return work(position)
            except BaseException as error:
                failed(error)
                raise

        return [self._threads.submit(attempt, position) for position in range(len(self.replicas))]

    def each(self, work: Callable[[int], T], failed: Callable[[BaseException], None] = lambda error: None) -> list[T]:
        """Return the result of `work` for each local replica, as `begin` runs it. A single replica runs in this thread.

        Raises:
            BaseException: The error of the first replica that failed, after all have ended.
        """
        if len(self.replicas) == 1:
            return [work(0)]
        return results_of(self.begin(work, failed))

    def place(self, tree: Tree) -> Tree:
        """Put a host tree, with all local replicas along the first axis of its leaves, on the devices.

        With several waves it stays on the host until each wave begins.

        Raises:
            ValueError: JAX would cut off integers of NumPy.
        """
        refuse_cut_integers(tree)
        if self.waves > 1:
            return tree
        if len(set(self.devices)) == 1:
            return jax.device_put(tree, self.devices[0])
        mesh = jax.sharding.Mesh(np.array(self.devices), ("replica",))
        return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica")))

    def parts(self, tree: Tree) -> list[Tree]:
        """Split a tree along the first axis of its leaves into one tree for each local replica, without a copy."""
        if len(self.replicas) == 1:
            return [tree]
        leaves, structure = trees.flatten(tree)
        cut = [self._cut(leaf) for leaf in leaves]
        positions = range(len(self.replicas))
        return [trees.unflatten(structure, [parts[position] for parts in cut]) for position in positions]

    def _cut(self, leaf: Leaf) -> Sequence[Tree]:
        if is_jax_array(leaf) and len(leaf.sharding.device_set) > 1:
            shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            if len(shards) == len(self.replicas):
                return [shard.data for shard in shards]
            leaf = np.asarray(leaf)
        rows = leaf.shape[0] // len(self.replicas)
        # On an accelerator the array stays there, because borrowing it would wait for the device.
        host = leaf if is_jax_array(leaf) and not self.is_cpu else borrow(leaf)
        return [host[position * rows : (position + 1) * rows] for position in range(len(self.replicas))]

    def replica_shape(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """Return the shape of one replica's part of a leaf that has all local replicas along its first axis.

        Raises:
            ValueError: The leaf cannot be split evenly.
        """
        local = len(self.replicas)
        if not leaf.ndim or leaf.shape[0] % local:
            raise ValueError(
                f"a batch has the shape {list(leaf.shape)} for {local} local replicas; "
                "its first axis must be a multiple of their number"
            )
        shape = (leaf.shape[0] // local, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    def share(self, tree: Tree) -> Sequence[Tree]:
        """Return the copy of a tree on each device, given the tree on the first one; on CPUs nothing is copied."""
        return [tree if device == self.devices[0] else jax.device_put(tree, device) for device in self.devices]

    def zeros(self, position: int, size: int, dtype: np.dtype) -> jax.Array:
        """Return a new array of `size` zeros for the local replica at this position."""
        zeros: jax.Array = jax.device_put(np.zeros(size, dtype), self.device_of(position), may_alias=False)
        return zeros


def results_of(begun: Sequence[Future[T]]) -> list[T]:
    """Wait for all threads, and return their results; raise the error of the first one that failed."""
    wait(begun)
    return [future.result() for future in begun]


@dataclass(frozen=True)
class DeviceGrid:
    """The devices of local replicas that span several devices each, as a grid of replicas x stages.

    On CPUs one device simulates all of them, so that a stage has one executable wherever it runs. Each column has
    threads of its own.

    Attributes:
        columns: For each device of a replica, that device of all local replicas; in the order of a replica's devices.
    """

    columns: tuple[ReplicaDevices, ...]

    @property
    def ipus_per_replica(self) -> int:
        """The number of devices that a replica spans."""
        return len(self.columns)

    @property
    def replicas(self) -> range:
        """The global indices of the local replicas."""
        return self.first.replicas

    @property
    def first(self) -> ReplicaDevices:
        """The first device of each local replica."""
        return self.columns[0]


def borrow(array: jax.Array | np.ndarray | np.generic) -> np.ndarray:
    """Return a read-only view of an array on one device, on CPUs without a copy. Random keys stay keys."""
    if not is_jax_array(array):
        return np.asarray(array)
    array.block_until_ready()
    dtype = array.dtype
    is_exportable = isinstance(dtype, np.dtype) and dtype.kind in "fiu" and dtype.isbuiltin == 1
    if is_exportable and array.size and next(iter(array.devices())).platform == "cpu":
        # A view that `np.asarray` returns would stay cached in the array and keep it from being donated.
        view: np.ndarray = np.from_dlpack(array)  # type: ignore[arg-type]  # JAX declares an older form of the protocol
        return view
    if is_key(array):
        return array  # type: ignore[return-value]  # NumPy has no such dtype
    return np.asarray(array)


def is_key(leaf: Leaf) -> bool:
    """Return whether a leaf of a tree is a typed random key, or an array of them."""
    return is_jax_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def prepare_environment(total_replicas: int) -> None:
    """Set the environment variables that XLA reads when JAX starts; JAX is not imported for it.

    Args:
        total_replicas: Number of replicas of all instances, which fixes the size of XLA's thread pool.
    """
    fix_thread_pool(os.environ, total_replicas)
    use_right_sums(os.environ)


def set_number_of_devices(number: int) -> None:
    """Give JAX this number of CPU devices, unless it has started or the user has set a number."""
    if _HOST_DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        logger.debug("JAX has started already, with %d devices", jax.local_device_count())


def claim_devices(
    replicas: range,
    total_replicas: int,
    local_index: int = 0,
    ipus_per_replica: int = 1,
    instruments: Instruments = _UNSEEN,
    executables_folder: str = "",
    is_spread: bool = False,
    first_device: int | None = None,
    runs_ahead: bool = True,
) -> DeviceGrid:
    """Find devices for each local replica, and set up JAX to compute the same bits wherever replicas run.

    On CPUs replicas run on the first of JAX's devices. JAX gets one CPU device per local replica all the same, for
    programs that put shards on devices of their own, and for simulated accelerators.

    Args:
        replicas: Local replicas.
        total_replicas: Number of replicas of all instances. It fixes the size of XLA's thread pool, so that replicas
            compute the same bits wherever they run.
        local_index: Index of this instance on its host, which decides its first accelerator.
        ipus_per_replica: Number of devices that each replica spans.
        instruments: Instruments that are told of compilations and of replicas at work.
        executables_folder: Folder of compiled programs if the environment names none; "" for none.
        is_spread: Whether each replica has a device of its own on CPUs too, as on accelerators.
        first_device: Position of the first accelerator among those that JAX sees; default: by the local index.
        runs_ahead: Whether this thread has work to do while programs run on a CPU, even if it has only one core.

    Raises:
        DeviceError: This version of jaxlib would give wrong sums on the CPU; see `insist_on_right_sums`.
    """
    warn_of_little_address_space()
    executables = use_executable_cache(os.environ, executables_folder)
    prepare_environment(total_replicas)
    if not runs_ahead:
        _run_in_calling_thread()
    set_number_of_devices(len(replicas))
    found = choose_grid(replicas, local_index, executables, ipus_per_replica, instruments, is_spread, first_device)
    if found.columns[0].is_cpu:
        insist_on_right_sums(os.environ)
        if os.environ[POOL_VARIABLE] != str(thread_pool_size(total_replicas)):
            logger.info("%s is %s; set the same value for all instances", POOL_VARIABLE, os.environ[POOL_VARIABLE])
    return found


def _run_in_calling_thread() -> None:
    """Make JAX run programs for CPUs in the thread that calls them, if this process has one core.

    In a thread of its own a program would only wait for the calling thread, and the other way round. Each change of
    threads takes 5 to 10 us, and a step has 4 to 5 of them. The bits are the same. JAX reads the setting when it
    starts.
    """
    if len(os.sched_getaffinity(0)) == 1:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def choose_grid(
    replicas: range,
    local_index: int = 0,
    executables: Path | None = None,
    ipus_per_replica: int = 1,
    instruments: Instruments = _UNSEEN,
    is_spread: bool = False,
    first_device: int | None = None,
) -> DeviceGrid:
    """Return the devices that `claim_devices` gives to local replicas, once JAX has started, without other effects.

    If there are fewer devices than a replica spans, the replica uses some of them several times.

    Args:
        replicas: Local replicas.
        local_index: Index of this instance on its host.
        executables: Folder of compiled programs, or None.
        ipus_per_replica: Number of devices that each replica spans.
        instruments: Instruments that are told of compilations and of replicas at work.
        is_spread: Whether each replica has a device of its own on CPUs too.
        first_device: Position of the first accelerator among those that JAX sees; default: by the local index.
    """
    devices = jax.local_devices()
    local = len(replicas)
    if devices[0].platform == "cpu" and not is_spread:
        column = ReplicaDevices((devices[0],) * local, replicas, executables, instruments)
        return DeviceGrid(tuple(replace(column) for _ in range(ipus_per_replica)))
    possible = (width for width in range(1, local + 1) if local % width == 0)
    width = max(width for width in possible if width == 1 or width * ipus_per_replica <= len(devices))
    start = local_index * local * ipus_per_replica if first_device is None else first_device
    columns = []
    for number in range(ipus_per_replica):
        places = (start + replica * ipus_per_replica + number for replica in range(width))
        of_column = tuple(devices[place % len(devices)] for place in places)
        columns.append(ReplicaDevices(of_column, replicas, executables, instruments))
    return DeviceGrid(tuple(columns))
