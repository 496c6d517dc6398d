"""The simulated devices on which an instance runs its replicas."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from popdist.environments import thread_pool_setting, thread_pool_size
from popdist.environments.threads import VARIABLE as POOL_VARIABLE
from strategies.callbacks import in_order
from strategies.compilation import compiled_in_turn, use_executable_cache
from strategies.right_sums import insist_on_right_sums, use_right_sums

logger = logging.getLogger(__name__)

AXIS = "replica"
_HOST_DEVICES_FLAG = "xla_force_host_platform_device_count"


@dataclass(frozen=True)
class ReplicaDevices:
    """Where the local replicas run: `width` at a time, in as many waves as that takes.

    Attributes:
        devices: one device per replica of a wave.
        replicas: the global indices of the local replicas.
        calls_back: whether collectives of compiled programs leave them.
        executables: the folder where compiled programs are kept; None to compile them at every start.
    """

    devices: tuple[jax.Device, ...]
    replicas: range
    calls_back: bool = False
    executables: Path | None = None

    @property
    def width(self) -> int:
        """The replicas that run at once."""
        return len(self.devices)

    @property
    def waves(self) -> int:
        """How often the program runs for one step of all local replicas."""
        return len(self.replicas) // self.width

    @property
    def is_lockstep(self) -> bool:
        """Whether all local replicas run at once, so that they can wait for each other."""
        return self.waves == 1

    @cached_property
    def mesh(self) -> Mesh:
        """The devices along the axis `AXIS`."""
        return Mesh(np.array(self.devices), (AXIS,))

    @cached_property
    def split(self) -> NamedSharding:
        """Each replica has its part of the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @cached_property
    def copied(self) -> NamedSharding:
        """Each replica has all of it."""
        return NamedSharding(self.mesh, PartitionSpec())

    def compile(
        self, function: Callable[..., Any], is_split: Sequence[bool], donated: Sequence[int] = ()
    ) -> Callable[..., Any]:
        """One program in which every replica of a wave runs `function`.

        Args:
            function: the program of one replica; its results are concatenated along their first axis.
            is_split: for each argument whether the replicas get their parts of its first axis, or all of it.
            donated: the arguments whose memory the results may take over.
        """
        specs = tuple(PartitionSpec(AXIS) if split else PartitionSpec() for split in is_split)
        function = in_order(function) if self.calls_back else function
        # With check_vma JAX would add up the gradients of what the replicas share, in an order of its own.
        spread = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), check_vma=False)
        return compiled_in_turn(
            jax.jit(spread, donate_argnums=tuple(donated), keep_unused=bool(donated)), self.executables
        )

    def trace(
        self, function: Callable[..., Any], arguments: Sequence[Any], is_split: Sequence[bool]
    ) -> jax.extend.core.ClosedJaxpr:
        """The equations of one replica's program.

        Args:
            function: the program of one replica.
            arguments: pytrees of the shapes that all replicas of a wave have together.
            is_split: for each of them whether the replicas get their parts of its first axis.
        """
        traced = []

        def body(*arguments: Any) -> tuple[()]:
            # Equations remember the mesh under which they were traced, so it has to be this one.
            traced.append(jax.make_jaxpr(function)(*arguments))
            return ()

        specs = tuple(PartitionSpec(AXIS) if split else PartitionSpec() for split in is_split)
        spread = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=(), check_vma=False)
        jax.eval_shape(spread, *arguments)
        return traced[0]

    def cut_into_waves(self, tree: Any) -> Iterator[Any]:
        """The parts of a tree whose leaves have all local replicas along the first axis, one per wave."""
        if self.waves == 1:
            yield tree
            return
        for wave in range(self.waves):
            yield jax.tree.map(lambda leaf, w=wave: np.split(np.asarray(leaf), self.waves)[w], tree)

    def place(self, tree: Any) -> Any:
        """Put a host tree, with all local replicas along the first axis of its leaves, on the devices.

        In several waves it stays on the host until its wave comes.
        """
        return jax.device_put(tree, self.split) if self.waves == 1 else tree

    def wave_shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """The shape of what one wave of replicas takes of a leaf that has all local replicas along its first axis.

        Raises:
            ValueError: if it cannot be divided among them.
        """
        local = len(self.replicas)
        if not leaf.ndim or leaf.shape[0] % local:
            raise ValueError(
                f"a batch of shape {list(leaf.shape)} for {local} local replicas; "
                "its first axis must be a multiple of their number"
            )
        rows = leaf.shape[0] // self.waves
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))

    def placed_shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """The shape of a wave's part of a leaf, and where it lies, if `place` has put the whole of it there."""
        shape = self.wave_shape(leaf)
        return shape if self.waves > 1 else jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self.split)

    def shared_shape(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        """The shape of what `share` makes of an array, and where it lies."""
        is_moved = self.width > 1 or self.devices[0].platform != "cpu"
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.copied if is_moved else leaf.sharding)

    def share(self, tree: Any) -> Any:
        """Show a tree that lies on the first device to all devices; on CPU nothing is copied."""
        if self.devices[0].platform != "cpu":
            return jax.device_put(tree, self.copied)
        if self.width == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        views = [borrow(leaf) for leaf in leaves]
        aliases = [leaves] + [jax.device_put(views, device) for device in self.devices[1:]]
        shared = [
            jax.make_array_from_single_device_arrays(leaf.shape, self.copied, list(parts))
            for leaf, *parts in zip(leaves, *aliases, strict=True)
        ]
        return jax.tree.unflatten(structure, shared)

    def views(self, array: jax.Array) -> list[np.ndarray]:
        """The parts of a split result as host arrays, one per replica; on CPU nothing is copied.

        Let go of them before the array is donated: memory that somebody sees is not handed on.
        """
        if self.width == 1:
            return [borrow(array)]
        parts = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return [borrow(part.data) for part in parts]

    def zeros(self, size: int, dtype: np.dtype) -> jax.Array:
        """An array of `size` zeros for each replica of a wave, behind each other."""
        zeros: jax.Array = jax.device_put(np.zeros(self.width * size, dtype), self.split, may_alias=False)
        return zeros

    def zeros_shape(self, size: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        """The shape of what `zeros` makes, and where it lies."""
        return jax.ShapeDtypeStruct((self.width * size,), dtype, sharding=self.split)


def borrow(array: jax.Array | np.ndarray | np.generic) -> np.ndarray:
    """A read-only view of an array on one device, or of NumPy's; on CPU nothing is copied. Keys stay what they are."""
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


def is_key(leaf: Any) -> bool:
    """Whether a leaf of a tree is a typed random key, or an array of them."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def claim_devices(replicas: range, total_replicas: int, local_index: int = 0) -> ReplicaDevices:
    """Find a device for each local replica; before JAX starts, simulate as many on the CPU as needed.

    Args:
        replicas: the local replicas.
        total_replicas: the replicas of all instances; fixes the size of XLA's thread pool, so that replicas compute
            the same bits wherever they run.
        local_index: this instance's place on its host; with accelerators, whose turn begins there.

    Raises:
        DeviceError: this version of jaxlib would give wrong sums on the CPU; see `insist_on_right_sums`.
    """
    executables = use_executable_cache(os.environ)
    os.environ.update(thread_pool_setting(os.environ, total_replicas))
    use_right_sums(os.environ)
    if _HOST_DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):  # else the user has said how many
        try:
            jax.config.update("jax_num_cpu_devices", len(replicas))
        except RuntimeError:
            logger.debug("JAX has started already, with %d devices", jax.local_device_count())
    found = choose_devices(replicas, local_index, executables)
    if found.devices[0].platform == "cpu":
        insist_on_right_sums(os.environ)
        if os.environ[POOL_VARIABLE] != str(thread_pool_size(total_replicas)):
            logger.info("%s is %s: keep it the same everywhere", POOL_VARIABLE, os.environ[POOL_VARIABLE])
    return found


def choose_devices(replicas: range, local_index: int = 0, executables: Path | None = None) -> ReplicaDevices:
    """Those of JAX's devices that `claim_devices` gives to local replicas, once JAX has started; changes nothing.

    Args:
        replicas: see `claim_devices`.
        local_index: see `claim_devices`.
        executables: the folder where compiled programs are kept.
    """
    devices = jax.local_devices()
    start = 0 if devices[0].platform == "cpu" else local_index * len(replicas)
    width = max(width for width in range(1, len(replicas) + 1) if len(replicas) % width == 0 and width <= len(devices))
    chosen = tuple(devices[(start + number) % len(devices)] for number in range(width))
    return ReplicaDevices(chosen, replicas, executables=executables)
