"""The paths on which gradients on JAX's devices become means over all instances.

XLA's sums follow IEEE 754. Its divisions on GPUs do not, and XLA turns a division by a constant into a multiplication
by the reciprocal. So programs divide in float64, by a divisor that is an argument of the program. Rounding the result
gives the bits of a division in float32. On CPUs XLA flushes denormal numbers to zero; all other results have the same
bits there too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from collectives import Communicator, PeerLostError
from collectives.arrays import accumulator_dtype
from collectives.dlpack import ExportedArray
from collectives.plans.spread import Spread
from collectives.tree import TreeNode, steps
from strategies.errors import DeviceError
from strategies.exchange.choice import COMPILED, DevicePath, asked_exchange
from strategies.exchange.flat import fusion_groups
from strategies.exchange.window_path import LocalPath, WindowPath, memory_of, windows_if_possible
from strategies.jax.programs.compilation import jit
from strategies.jax.replicas.replicas import Replicas

Buffers = Sequence[jax.Array]
"""The flat buffers of one bucket."""


def added(nodes: tuple[TreeNode, ...], sums: Buffers) -> jax.Array:
    """Return the sum of neighbours in the tree, in the accumulators' dtype; traceable."""
    dtype = accumulator_dtype(np.dtype(sums[0].dtype), "sum")
    values = [one.astype(dtype) for one in sums]
    for left, right, _ in steps(nodes):
        values.append(values[left] + values[right])
    return values[-1]


def mean_of(total: jax.Array, dtype: np.dtype, replicas: int, divisor: jax.Array) -> jax.Array:
    """Return a sum divided once by R, and rounded once to a dtype; traceable.

    Args:
        total: Sum over all replicas.
        dtype: Dtype of the mean.
        replicas: R.
        divisor: R as a float32 scalar; an argument of the program, so that XLA does not know it.
    """
    if replicas & (replicas - 1) == 0:  # for powers of two, a multiplication has the bits of a division
        return (total * np.float32(1 / replicas)).astype(dtype)
    with jax.enable_x64(True):
        quotient = total.astype(jnp.float64) / divisor.astype(jnp.float64)
        return quotient.astype(total.dtype).astype(dtype)


class JaxArithmetic:
    """The `DeviceArithmetic` of JAX: sums of a bucket's buffers, by one compiled program for all buffers."""

    def mean(self, nodes: Sequence[TreeNode], sums: Buffers, dtype: np.dtype, replicas: int) -> jax.Array:
        """Return the mean of one buffer. The sums' memory is not taken over: it may belong to another process."""
        first, *others = [[one] for one in sums]
        found: list[jax.Array] = _means(tuple(nodes), (dtype,), replicas, False)(first, others, np.float32(replicas))
        return found[0]

    def totals(self, nodes: Sequence[TreeNode], sums: Sequence[Buffers]) -> list[jax.Array]:
        """Return the sum of each buffer.

        Args:
            nodes: Neighbours in the tree, in order.
            sums: Buffers of each node; the memory of the first node's buffers is taken over.
        """
        first, *others = map(list, sums)
        found: list[jax.Array] = _totals(tuple(nodes), _are_wide(first))(first, others)
        return found

    def means(
        self, nodes: Sequence[TreeNode], sums: Sequence[Buffers], dtypes: Sequence[np.dtype], replicas: int
    ) -> list[jax.Array]:
        """Return the mean of each buffer over all replicas.

        Args:
            nodes: Nodes that together are the whole tree.
            sums: Buffers of each node; the memory of the first node's buffers is taken over.
            dtypes: Dtypes of the means.
            replicas: R.
        """
        first, *others = map(list, sums)
        is_taken_over = _are_wide(first) and [one.dtype for one in first] == list(dtypes)
        program = _means(tuple(nodes), tuple(dtypes), replicas, is_taken_over)
        found: list[jax.Array] = program(first, others, np.float32(replicas))
        return found


def _are_wide(buffers: Buffers) -> bool:
    """Return whether buffers have the accumulators' dtype, so that a sum may take over their memory."""
    return all(accumulator_dtype(np.dtype(one.dtype), "sum") == one.dtype for one in buffers)


@cache
def _totals(nodes: tuple[TreeNode, ...], is_taken_over: bool) -> jax.stages.Wrapped:
    def totals(first: Buffers, others: Sequence[Buffers]) -> list[jax.Array]:
        return [added(nodes, of_nodes) for of_nodes in zip(first, *others, strict=True)]

    return jit(totals, donate_argnums=(0,) if is_taken_over else ())


@cache
def _means(
    nodes: tuple[TreeNode, ...], dtypes: tuple[np.dtype, ...], replicas: int, is_taken_over: bool
) -> jax.stages.Wrapped:
    def means(first: Buffers, others: Sequence[Buffers], divisor: jax.Array) -> list[jax.Array]:
        pairs = zip(zip(first, *others, strict=True), dtypes, strict=True)
        return [mean_of(added(nodes, of_nodes), dtype, replicas, divisor) for of_nodes, dtype in pairs]

    return jit(means, donate_argnums=(0,) if is_taken_over else ())


@final
class JaxViews:
    """The `DeviceViews` of JAX.

    Args:
        device: Device for copies of the mapped memory. Host memory belongs to the first simulated device.
    """

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def view(self, array: ExportedArray) -> jax.Array:
        """Return an array of JAX that views memory of a path, without a copy."""
        found: jax.Array = jax.dlpack.from_dlpack(array, copy=False if array.nbytes else None)
        return found

    def addresses(self, arrays: Sequence[jax.Array]) -> list[int]:
        """Wait until arrays have been computed, and return their addresses."""
        jax.block_until_ready(arrays)
        return [array.unsafe_buffer_pointer() for array in arrays]

    def dtype_of(self, array: jax.Array) -> np.dtype:
        """Return the NumPy dtype of an array."""
        return np.dtype(array.dtype)

    def taken(self, view: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
        """Wait for, and return, copies of parts of a flat view."""
        found = _taken(tuple(starts), tuple(sizes))(view)
        return [self._placed(one) for one in jax.block_until_ready(found)]

    def stacked(self, rows: Sequence[jax.Array]) -> jax.Array:
        """Wait for, and return, a copy of flat views, stacked along a new first axis."""
        return self._placed(jax.block_until_ready(_stacked(rows)))

    def _placed(self, array: jax.Array) -> jax.Array:
        return array if array.devices() == {self._device} else jax.device_put(array, self._device)


@cache
def _taken(starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.stages.Wrapped:
    def taken(flat: jax.Array) -> list[jax.Array]:
        # A copy, because XLA returns a slice that is the whole array as the array itself, in memory that changes.
        return [jnp.copy(flat[start : start + size]) for start, size in zip(starts, sizes, strict=True)]

    return jit(taken)


@jax.jit
def _stacked(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(rows)


GROUP_BYTES = 32 << 20
"""The most bytes of buffers in one collective. A collective over NCCL costs some 40 us; links carry 10 MB in that time.
But putting buffers together takes memory of the same size."""
_INSTANCES = "instances"
_EACH, _SAME = PartitionSpec(_INSTANCES), PartitionSpec()

Dtypes: TypeAlias = tuple[np.dtype, ...]


@final
class CompiledPath(DevicePath):
    """A path of one program: all-to-all of slices, sum of a slice in the order of the tree, mean, and all-gather.

    The program runs over NCCL on GPUs and over gloo on CPUs. All instances meet in the communicator before it begins,
    so that a missing instance is named within the usual time limit. On CPUs the path waits for each program: gloo would
    mix the messages of two programs at once.

    Args:
        spread: Spread of the replicas over the instances.
        communicator: Communicator of the instances, whose JAX runtimes are connected (`connect_processes`).
        device: Device of this instance's sums.

    Raises:
        DeviceError: On all instances, if JAX does not see the device of each instance as that of another process.
            Collective.
    """

    path_name = COMPILED

    def __init__(self, spread: Spread, communicator: Communicator, device: jax.Device) -> None:
        super().__init__(spread, communicator.rank)
        self._communicator = communicator
        self._device = device
        self._is_cpu = device.platform == "cpu"
        if self._is_cpu and jax.config.jax_cpu_collectives_implementation is None:  # type: ignore[attr-defined]
            raise DeviceError(
                f"gloo listens at the address of this machine's name, but {socket.gethostname()!r} has none; add it to "
                "/etc/hosts, or set POPDIST_EXCHANGE=host"
            )
        self._mesh = _mesh(communicator, device)
        self._each = NamedSharding(self._mesh, _EACH)
        divisor = jax.device_put(np.float32(spread.replicas), device)
        self._divisor = jax.make_array_from_single_device_arrays((), NamedSharding(self._mesh, _SAME), [divisor])
        self._programs: dict[Dtypes, jax.stages.Wrapped] = {}

    @override
    def means(self, name: str, sums: Sequence[Sequence[jax.Array]], dtypes: Sequence[np.dtype]) -> Sequence[jax.Array]:
        full = [number for number, of_buffer in enumerate(sums) if of_buffer[0].size]
        means = self._means_of(name, [sums[number] for number in full], tuple(dtypes[number] for number in full))
        found = dict(zip(full, means, strict=True))
        return [found[number] if number in found else self._empty(0, dtype) for number, dtype in enumerate(dtypes)]

    @override
    def gather(self, name: str, own: jax.Array) -> jax.Array:
        if not own.size:
            return self._empty((self.spread.size, 0), own.dtype)
        return self._together(name, self._gathering, [own])[0]

    def _empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jnp.zeros(shape, dtype, device=self._device)

    def _means_of(self, name: str, sums: Sequence[Sequence[jax.Array]], dtypes: Dtypes) -> Sequence[jax.Array]:
        if not sums:
            return ()
        program = self._programs.get(dtypes)
        if program is None:
            program = self._programs[dtypes] = self._program(dtypes)
        own = [self._packed(of_buffer, self._wire_dtype(dtype)) for of_buffer, dtype in zip(sums, dtypes, strict=True)]
        return self._together(name, partial(program, self._divisor), own)

    # ---- the contribution of this instance

    @cached_property
    def _rows(self) -> int:
        """The number of nodes that each instance sends. An instance with fewer nodes sends zeros, which are ignored."""
        return max(map(len, self.spread.sums))

    def _wire_dtype(self, dtype: np.dtype) -> np.dtype:
        are_leaves = all(node.is_leaf for nodes in self.spread.sums for node in nodes)
        return dtype if are_leaves else accumulator_dtype(dtype, "sum")

    def _packed(self, sums: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
        """Return the sums of a buffer as one flat array of `_rows` rows."""
        if self._rows > 1:
            packed: jax.Array = _pack(tuple(sums), self._rows, dtype)
            return packed
        return sums[0] if sums[0].dtype == dtype else sums[0].astype(dtype)

    # ---- programs of all instances

    def _together(
        self, name: str, program: Callable[..., Sequence[jax.Array]], own: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Begin a program when all instances have arrived; return this instance's results.

        Raises:
            PeerLostError: On CPUs, an instance has ended. On GPUs reading the results raises JAX's error.
        """
        if self._is_cpu:
            jax.block_until_ready(own)
        self._communicator.barrier(name=f"compiled exchange of {name}")
        results = program(*map(self._of_all, own))
        if self._is_cpu:
            self._wait(name, results)
        return [result.addressable_data(0) for result in results]

    def _wait(self, name: str, results: Sequence[jax.Array]) -> None:
        try:
            jax.block_until_ready(results)
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(f"{name} could not be exchanged by {self.spread.size} instances: {error}") from error

    def _of_all(self, own: jax.Array) -> jax.Array:
        shape = (self.spread.size * own.shape[0],)
        return jax.make_array_from_single_device_arrays(shape, self._each, [own])

    @cached_property
    def _gathering(self) -> jax.stages.Wrapped:
        def gather(own: jax.Array) -> list[jax.Array]:
            return [jax.lax.all_gather(own, _INSTANCES)]

        return jit(jax.shard_map(gather, mesh=self._mesh, in_specs=_EACH, out_specs=_EACH, check_vma=False))

    def _program(self, dtypes: Dtypes) -> jax.stages.Wrapped:
        """Return the program that exchanges buffers of these dtypes. If sums fit, the means take over their memory."""

        def exchange(divisor: jax.Array, *own: jax.Array) -> list[jax.Array]:
            rows = [each.reshape(self._rows, -1) for each in own]
            means: dict[int, jax.Array] = {}
            for group in fusion_groups([each.nbytes for each in rows], dtypes, GROUP_BYTES):
                together = jnp.concatenate([rows[number] for number in group], 1)
                ends = list(accumulate(rows[number].shape[1] for number in group))
                parts = jnp.split(self._mean(together, dtypes[group[0]], divisor), ends[:-1])
                means.update(zip(group, parts, strict=True))
            return [means[number] for number in range(len(own))]

        specs = (_SAME, *[_EACH for _ in dtypes])
        mapped = jax.shard_map(exchange, mesh=self._mesh, in_specs=specs, out_specs=_EACH, check_vma=False)
        fitting = [number for number, dtype in enumerate(dtypes) if self._wire_dtype(dtype) == dtype]
        return jit(mapped, donate_argnums=[1 + number for number in fitting] if self._rows == 1 else ())

    def _mean(self, own: jax.Array, dtype: np.dtype, divisor: jax.Array) -> jax.Array:
        """Return the mean of a buffer; traced on each instance.

        Args:
            own: Nodes of this instance, one row for each.
            dtype: Dtype of the mean.
            divisor: R.
        """
        instances, (rows, size) = self.spread.size, own.shape
        share = -(-size // instances)
        padded = jnp.pad(own, ((0, 0), (0, instances * share - size)))
        slices = padded.reshape(rows, instances, share).swapaxes(0, 1)
        received = jax.lax.all_to_all(slices, _INSTANCES, 0, 0, tiled=True)
        places = [(rank, row) for rank, nodes in enumerate(self.spread.sums) for row in range(len(nodes))]
        nodes = tuple(self.spread.sums[rank][row] for rank, row in places)
        total = added(nodes, [received[place] for place in places])
        mean = mean_of(total, dtype, self.spread.replicas, divisor)
        means: jax.Array = jax.lax.all_gather(mean, _INSTANCES, tiled=True)
        return means[:size]


def _mesh(communicator: Communicator, device: jax.Device) -> Mesh:
    """Return the mesh of one device of each instance. Collective."""
    ids = communicator.all_gather(np.array([device.id], np.int64), name="devices of the compiled exchange").ravel()
    found = {each.id: each for each in jax.devices(device.platform)}
    devices = [found.get(number) for number in ids.tolist()]
    processes = {each.process_index for each in devices if each is not None}
    if len(processes) < len(devices):
        raise DeviceError(
            f"JAX started before it could be connected with the JAX of all {len(devices)} instances; make the strategy "
            "before the first array and the first call of jax.devices(), or set POPDIST_EXCHANGE=host"
        )
    return Mesh(np.array(devices), (_INSTANCES,))


@partial(jax.jit, static_argnums=(1, 2))
def _pack(sums: Sequence[jax.Array], rows: int, dtype: np.dtype) -> jax.Array:
    missing = jnp.zeros((rows - len(sums)) * sums[0].size, dtype)
    return jnp.concatenate([*[each.astype(dtype) for each in sums], missing])


def path_for(replicas: Replicas) -> DevicePath | None:
    """Return the path of gradients that stay on the device, or None if they go through the host.

    Collective if several instances keep gradients on devices.

    Raises:
        DeviceError: The instances' devices cannot work together.
        MappingError: The job asks for windows, and the instances cannot map each other's memory.
    """
    if not replicas.exchange.is_on_device:
        return None
    communicator, device = replicas.communicator, replicas.devices.devices[0]
    if communicator.size == 1:
        return LocalPath(replicas.num_replicas_in_sync, JaxArithmetic(), replicas.local_replicas)
    counts = communicator.all_gather(np.array(len(replicas.local_replicas)), name="replicas of each instance")
    if replicas.exchange.path_name == COMPILED:
        return CompiledPath(Spread.apart(counts.tolist()), communicator, device)
    spread, gpu = Spread.together(counts.tolist()), None if device.platform == "cpu" else device.local_hardware_id
    return windows_if_possible(
        asked_exchange(replicas.defaults.exchange, os.environ),
        lambda: WindowPath(spread, communicator, memory_of(gpu), JaxArithmetic(), JaxViews(device)),
    )
