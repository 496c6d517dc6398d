"""The layout of a replica's gradients in flat buffers, the memory for their means, and copies from a GPU.

Gradients leave the programs that compute them flat, one buffer per dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from collectives import Communicator
from collectives.cuda.device import CudaDevice
from collectives.errors import CudaError, MappingError
from strategies.exchange.flat import FlatLayout, Shards
from strategies.exchange.host_copies import HostCopies, HostSums, PendingCopies, Source
from strategies.exchange.means import Allocate, Bucket
from strategies.exchange.window_path import gpu_of
from strategies.jax.replicas.devices import ReplicaDevices, borrow
from strategies.typing import Leaf, Tree


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


logger = logging.getLogger("strategies.jax")


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
