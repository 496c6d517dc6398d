"""The compiled path: means over all instances, by one program of JAX's own collectives per bucket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from collectives import Communicator, PeerLostError
from collectives.arrays import accumulator_dtype
from collectives.plans.spread import Spread
from strategies.errors import DeviceError
from strategies.exchange.fusion import fusion_groups
from strategies.exchange.on_device import COMPILED, DevicePath
from strategies.jax.on_device.arithmetic import added, mean_of
from strategies.jax.programs.program import jit

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

    word = COMPILED

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


def _pack_rows(sums: Sequence[jax.Array], rows: int, dtype: np.dtype) -> jax.Array:
    missing = jnp.zeros((rows - len(sums)) * sums[0].size, dtype)
    return jnp.concatenate([*[each.astype(dtype) for each in sums], missing])


_pack = jax.jit(_pack_rows, static_argnums=(1, 2))
