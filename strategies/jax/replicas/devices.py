"""The devices and threads that run an instance's replicas, and the facts about its accelerators."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import strategies.trees as trees
from collectives.cuda.driver import visible_gpus
from collectives.instruments import COMPILE, Instruments
from popdist.instance import Instance
from popdist.timeline.recorder import Recorder
from popdist.xla import fix_thread_pool
from strategies.exchange.choice import (
    CPU,
    GPU,
    ON_CPUS,
    SINGLE,
    ExchangeChoice,
    InstanceFacts,
    agreed_choice,
    are_facts_needed,
    asked_exchange,
)
from strategies.jax.programs.compilation import DeviceProgram, use_executable_cache
from strategies.jax.programs.xla_pitfalls import (
    check_integers_fit,
    jax_has_started,
    use_right_sums,
    warn_of_little_address_space,
)
from strategies.jax.replicas.processes import Membership, RuntimeState, runtime_state
from strategies.late_jax import is_jax_array, is_jax_loaded, jax, jnp
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
        from strategies.jax.replicas.collective_equations import in_order  # imports JAX

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
        check_integers_fit(tree)
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
    """Return a read-only view of an array on the host, without a copy if it is on one CPU. Random keys stay keys."""
    if not is_jax_array(array):
        return np.asarray(array)
    array.block_until_ready()
    dtype = array.dtype
    is_exportable = isinstance(dtype, np.dtype) and dtype.kind in "fiu" and dtype.isbuiltin == 1
    if is_exportable and array.size and [each.platform for each in array.devices()] == ["cpu"]:
        # A view that `np.asarray` returns would stay cached in the array and keep it from being donated.
        return np.from_dlpack(array)  # type: ignore[arg-type]  # JAX declares an older form of the protocol
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


def prepare_start(
    local: int, total_replicas: int, executables_folder: str = "", runs_ahead: bool = True
) -> Path | None:
    """Set up JAX, before it starts, to compute the same bits wherever replicas run; return the folder of executables.

    On CPUs replicas run on the first of JAX's devices. JAX gets one CPU device per local replica all the same, for
    programs that put shards on devices of their own, and for simulated accelerators.

    Args:
        local: Number of local replicas.
        total_replicas: Number of replicas of all instances. It fixes the size of XLA's thread pool, so that replicas
            compute the same bits wherever they run.
        executables_folder: Folder of compiled programs if the environment names none; "" for none.
        runs_ahead: Whether this thread has work to do while programs run on a CPU, even if it has only one core.
    """
    warn_of_little_address_space()
    executables = use_executable_cache(os.environ, executables_folder)
    prepare_environment(total_replicas)
    if not runs_ahead and len(os.sched_getaffinity(0)) == 1:
        # Make JAX run programs for CPUs in the thread that calls them. In a thread of its own a program would only wait
        # for the calling thread, and the other way round. Each change of threads takes 5 to 10 us, and a step has 4 to
        # 5 of them. The bits are the same. JAX reads the setting when it starts.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    set_number_of_devices(local)
    return executables


def choose_grid(
    replicas: range,
    local_index: int = 0,
    executables: Path | None = None,
    ipus_per_replica: int = 1,
    instruments: Instruments = _UNSEEN,
    is_spread: bool = False,
    first_device: int | None = None,
) -> DeviceGrid:
    """Return the devices of local replicas; this starts JAX.

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


# ---- accelerators

_PLUGINS = "jax_plugins"
_OF_GPUS = ("cuda", "gpu", "rocm")


def exchange_of(
    membership: Membership, platform: str, variables_on_host: bool, gpu: str | None = None
) -> ExchangeChoice:
    """Return the exchange of a job, and note it in the timeline. Collective, except on CPUs with the default exchange.

    Args:
        membership: Membership of this instance.
        platform: Platform of its replicas.
        variables_on_host: Whether variables and optimizer state live in host memory.
        gpu: UUID of its first GPU in another framework than JAX; default: the first GPU by JAX's numbers.

    Raises:
        DeviceError, ValueError: As in `agreed_choice` and `asked_exchange`.
    """
    asked = asked_exchange(membership.defaults.exchange, os.environ)
    if not are_facts_needed(platform, asked):
        return ON_CPUS
    facts = facts_of(membership, platform, variables_on_host)
    own = facts if gpu is None else replace(facts, gpu=gpu, can_connect=True)  # for another framework than JAX
    chosen = agreed_choice(membership.communicator, own, asked)
    for each in membership.communicator.instruments.attached:
        if isinstance(each, Recorder):
            each.measured(f"exchange {chosen.path_name}", 1.0)
    return chosen


def facts_of(membership: Membership, platform: str, variables_on_host: bool) -> InstanceFacts:
    """Return the facts about this instance.

    Args:
        membership: Membership of this instance.
        platform: Platform of its replicas.
        variables_on_host: Whether variables and optimizer state live in host memory.
    """
    instance = membership.instance
    return InstanceFacts(
        platform,
        first_gpu(instance) if platform == GPU else "",
        machine_of(instance),
        membership.transport if instance.count > 1 else SINGLE,
        has_nccl(),
        membership.can_carry_on,
        variables_on_host,
        runtime_state(instance.count) in (RuntimeState.UNSTARTED, RuntimeState.CONNECTED),
    )


def expected_platform() -> str:
    """Return the platform of `jax.local_devices()`, "cpu", "gpu" or another word, without starting JAX.

    A plugin for GPUs counts only if the CUDA driver sees a GPU, because JAX falls back to the CPU without one.
    """
    if jax_has_started():
        return str(jax.local_devices()[0].platform)
    # If JAX is not imported, the variable from which it will take the option.
    of_jax = jax.config.jax_platforms if is_jax_loaded() else os.environ.get("JAX_PLATFORMS")  # type: ignore[attr-defined]
    configured = str(of_jax or "").split(",")[0].strip().lower()
    if configured:
        return GPU if configured in _OF_GPUS else configured
    plugins = _plugins()
    of_cuda = [each for each in plugins if "cuda" in each]
    if "rocm" in " ".join(plugins) or (of_cuda and visible_gpus()):
        return GPU
    others = [each for each in plugins if each not in of_cuda]
    if importlib.util.find_spec("libtpu") is not None:
        others.append("tpu")
    return others[0] if others else CPU


def first_gpu(instance: Instance) -> str:
    """Return the UUID of the GPU that `choose_grid` gives to an instance's first replica; "" without a driver."""
    gpus = visible_gpus()
    place = instance.local_index * instance.local_replicas * instance.ipus_per_replica
    return gpus[place % len(gpus)].uuid if gpus else ""


def machine_of(instance: Instance) -> str:
    """Return a text that is equal for processes able to map each other's memory: host, boot and namespaces."""
    parts = [instance.host]
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts.append(boot.read_text().strip() if boot.exists() else "")
    namespaces = (Path("/proc/self/ns") / name for name in ("ipc", "pid"))
    parts += [str(each.stat().st_ino) for each in namespaces if each.exists()]
    return " ".join(parts)


def has_nccl() -> bool:
    """Return whether NCCL is installed, as the package that JAX and PyTorch require or as a library of the system."""
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec("nvidia.nccl") is not None:
            return True
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64")
    return any(Path(folder, "libnccl.so.2").exists() for folder in folders)


def _plugins() -> list[str]:
    """Return the names of the plugins that JAX will load, as `jax._src.xla_bridge.discover_pjrt_plugins` finds them."""
    names = {entry.value for entry in importlib.metadata.entry_points(group=_PLUGINS)}
    found = importlib.util.find_spec(_PLUGINS)
    if found is not None and found.submodule_search_locations:
        names.update(each.name for each in pkgutil.iter_modules(list(found.submodule_search_locations)))
    return sorted(name.rpartition(".")[2] for name in names)
