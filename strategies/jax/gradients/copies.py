"""Copies of JAX's gradients from a GPU to the host, and of their means back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import numpy as np

from collectives import Communicator
from collectives.cuda.device import CudaDevice
from collectives.errors import CudaError, MappingError
from strategies.exchange.host_copies import Arriving, HostCopies, Source
from strategies.exchange.host_sums import HostSums
from strategies.exchange.means import Bucket
from strategies.exchange.page_locks import gpu_of
from strategies.jax.replicas.devices import ReplicaDevices
from strategies.typing import Leaf, Tree

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

    def fetch(self, number: int, of_buffers: Sequence[Sequence[jax.Array]]) -> Arriving:
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
