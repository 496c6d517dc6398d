"""The devices on which an instance runs its replicas, and the threads that do it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives.instruments import COMPILE, Instruments
from popdist.xla import POOL_VARIABLE, thread_pool_setting, thread_pool_size
from strategies.jax.programs.compilation import use_executable_cache
from strategies.jax.programs.program import DeviceProgram
from strategies.jax.programs.xla_pitfalls import (
    insist_on_right_sums,
    refuse_cut_integers,
    use_right_sums,
    warn_of_little_address_space,
)
from strategies.jax.replicas.callbacks import in_order
from strategies.typing import Function, Leaf, Tree

T = TypeVar("T")

logger = logging.getLogger(__name__)

THREADS = "replica"
"""The names of threads that run replicas begin with it."""
_UNSEEN = Instruments()
_HOST_DEVICES_FLAG = "xla_force_host_platform_device_count"


@dataclass(frozen=True)
class ReplicaDevices:
    """The devices of the local replicas, which run `width` at a time, in as many waves as that takes.

    A replica's program is compiled for a single device and knows neither its neighbours nor their number. On CPUs all
    replicas share one device, and one executable, which a thread for each of them runs.

    Attributes:
        devices: one for each replica of a wave; on CPUs the same one for all.
        replicas: the global indices of the local replicas.
        executables: the folder where compiled programs are kept; None to compile them at every start.
        instruments: see programs being compiled, and replicas at work.
    """

    devices: tuple[jax.Device, ...]
    replicas: range
    executables: Path | None = None
    instruments: Instruments = field(default_factory=Instruments, repr=False, compare=False)

    @property
    def width(self) -> int:
        """The replicas that run at once."""
        return len(self.devices)

    @property
    def waves(self) -> int:
        """The number of rounds, each of `width` replicas, in one step of all local replicas."""
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
        """Return the program of one replica, to be run by all of them.

        Args:
            function: what a replica computes.
            donated: the arguments whose memory the results may take over.
        """
        return DeviceProgram(in_order(function), self.executables, donated, self.instruments.during[COMPILE])

    def begin(
        self, work: Callable[[int], T], failed: Callable[[BaseException], None] = lambda error: None
    ) -> list[Future[T]]:
        """Have threads do something for each local replica, for `width` of them at once.

        Args:
            work: takes the position of a local replica.
            failed: called at once with what `work` raises for one of them, for whom others may be waiting.
        """

        def attempt(position: int) -> T:
            try:
                return work(position)
            except BaseException as error:
                failed(error)
                raise

        return [self._threads.submit(attempt, position) for position in range(len(self.replicas))]

    def each(self, work: Callable[[int], T], failed: Callable[[BaseException], None] = lambda error: None) -> list[T]:
        """Return the result of `work` for each local replica; see `begin`. One replica alone runs in this thread.

        Raises:
            BaseException: what it has raised for the first of them, when all have ended.
        """
        if len(self.replicas) == 1:
            return [work(0)]
        return results_of(self.begin(work, failed))

    def place(self, tree: Tree) -> Tree:
        """Put a host tree, with all local replicas along the first axis of its leaves, on the devices.

        In several waves it stays on the host until its wave comes.

        Raises:
            ValueError: if JAX would cut off integers of NumPy.
        """
        refuse_cut_integers(tree)
        if self.waves > 1:
            return tree
        if len(set(self.devices)) == 1:
            return jax.device_put(tree, self.devices[0])
        return jax.device_put(tree, NamedSharding(Mesh(np.array(self.devices), ("replica",)), PartitionSpec("replica")))

    def parts(self, tree: Tree) -> list[Tree]:
        """Cut a tree with all local replicas along the first axis of its leaves into one for each, without a copy."""
        if len(self.replicas) == 1:
            return [tree]
        leaves, structure = jax.tree.flatten(tree)
        cut = [self._cut(leaf) for leaf in leaves]
        positions = range(len(self.replicas))
        return [jax.tree.unflatten(structure, [parts[position] for parts in cut]) for position in positions]

    def _cut(self, leaf: Leaf) -> Sequence[Tree]:
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            if len(shards) == len(self.replicas):
                return [shard.data for shard in shards]
            leaf = np.asarray(leaf)
        rows = leaf.shape[0] // len(self.replicas)
        # Nobody waits for an accelerator here.
        host = leaf if isinstance(leaf, jax.Array) and not self.is_cpu else borrow(leaf)
        return [host[position * rows : (position + 1) * rows] for position in range(len(self.replicas))]

    def replica_shape(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """Return the shape of what one replica takes of a leaf that has all local replicas along its first axis.

        Raises:
            ValueError: if it cannot be divided among them.
        """
        local = len(self.replicas)
        if not leaf.ndim or leaf.shape[0] % local:
            raise ValueError(
                f"a batch of shape {list(leaf.shape)} for {local} local replicas; "
                "its first axis must be a multiple of their number"
            )
        shape = (leaf.shape[0] // local, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    def share(self, tree: Tree) -> Sequence[Tree]:
        """Return a tree that lies on the first device as each of the devices sees it; on CPUs nothing is copied."""
        return [tree if device == self.devices[0] else jax.device_put(tree, device) for device in self.devices]

    def zeros(self, position: int, size: int, dtype: np.dtype) -> jax.Array:
        """Return an array of `size` zeros of its own for the local replica at this position."""
        zeros: jax.Array = jax.device_put(np.zeros(size, dtype), self.device_of(position), may_alias=False)
        return zeros


def results_of(begun: Sequence[Future[T]]) -> list[T]:
    """Return the results of threads, when all have ended; raise what the first of them has raised."""
    wait(begun)
    return [future.result() for future in begun]


@dataclass(frozen=True)
class DeviceGrid:
    """The devices of local replicas that span several devices each: replicas x stages.

    On CPUs all devices are simulated by the same one, so that a stage has one executable wherever it runs; each column
    has threads of its own.

    Attributes:
        columns: for each device of a replica where all local replicas have it, in the order of a replica's devices.
    """

    columns: tuple[ReplicaDevices, ...]

    @property
    def ipus_per_replica(self) -> int:
        """The devices that a replica spans."""
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
    """Return a read-only view of an array on one device, or of NumPy's; on CPU without a copy. Keys stay keys."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    array.block_until_ready()
    if is_key(array):
        return array  # type: ignore[return-value]  # NumPy has no such dtype
    is_exportable = array.dtype.kind in "fiu" and array.dtype.isbuiltin == 1
    if array.size and is_exportable and next(iter(array.devices())).platform == "cpu":
        # Unlike this one, a view that `np.asarray` returns stays cached in the array and keeps it from being donated.
        view: np.ndarray = np.from_dlpack(array)  # type: ignore[arg-type]  # JAX declares an older form of the protocol
        return view
    return np.asarray(array)


def is_key(leaf: Leaf) -> bool:
    """Return whether a leaf of a tree is a typed random key, or an array of them."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def claim_devices(
    replicas: range,
    total_replicas: int,
    local_index: int = 0,
    ipus_per_replica: int = 1,
    instruments: Instruments = _UNSEEN,
    executables_folder: str = "",
    is_spread: bool = False,
    first_device: int | None = None,
) -> DeviceGrid:
    """Find devices for each local replica, and have JAX compute what is the same wherever they run.

    On CPUs replicas run on the first of JAX's devices. That there are as many as local replicas is for programs that
    put shards on devices of their own, and for simulated accelerators.

    Args:
        replicas: the local replicas.
        total_replicas: the replicas of all instances; fixes the size of XLA's thread pool, so that replicas compute
            the same bits wherever they run.
        local_index: this instance's place on its host; with accelerators, whose turn begins there.
        ipus_per_replica: the devices that each replica spans.
        instruments: see programs for them being compiled, and replicas at work.
        executables_folder: where compiled programs are kept if the environment names no folder; "" for none.
        is_spread: whether each replica has a device of its own on CPUs too, as on accelerators.
        first_device: the place of the first accelerator among those that JAX sees; default: by the local index.

    Raises:
        DeviceError: this version of jaxlib would give wrong sums on the CPU; see `insist_on_right_sums`.
    """
    warn_of_little_address_space()
    executables = use_executable_cache(os.environ, executables_folder)
    os.environ.update(thread_pool_setting(os.environ, total_replicas))
    use_right_sums(os.environ)
    if _HOST_DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):  # else the user has said how many
        try:
            jax.config.update("jax_num_cpu_devices", len(replicas))
        except RuntimeError:
            logger.debug("JAX has started already, with %d devices", jax.local_device_count())
    found = choose_grid(replicas, local_index, executables, ipus_per_replica, instruments, is_spread, first_device)
    if found.columns[0].is_cpu:
        insist_on_right_sums(os.environ)
        if os.environ[POOL_VARIABLE] != str(thread_pool_size(total_replicas)):
            logger.info("%s is %s: keep it the same everywhere", POOL_VARIABLE, os.environ[POOL_VARIABLE])
    return found


def choose_grid(
    replicas: range,
    local_index: int = 0,
    executables: Path | None = None,
    ipus_per_replica: int = 1,
    instruments: Instruments = _UNSEEN,
    is_spread: bool = False,
    first_device: int | None = None,
) -> DeviceGrid:
    """Return the devices of JAX that `claim_devices` gives to local replicas, once JAX has started; change nothing.

    Where there are fewer devices than a replica spans, it uses some of them for several of its own.

    Args:
        replicas: see `claim_devices`.
        local_index: see `claim_devices`.
        executables: the folder where compiled programs are kept.
        ipus_per_replica: see `claim_devices`.
        instruments: see `claim_devices`.
        is_spread: see `claim_devices`.
        first_device: see `claim_devices`.
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
