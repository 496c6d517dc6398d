"""Views on the host of the buffers in which gradients leave their programs, made once for all steps."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from strategies.jax.replicas.devices import borrow


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


class _Lent:
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
    view: np.ndarray = np.asarray(_Lent(address, buffer.nbytes, owner)).view(np.dtype(buffer.dtype))
    return view


def _is_on_cpu(buffer: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in buffer.devices())
