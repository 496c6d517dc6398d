"""Memory of a GPU that array libraries read in place, and memory of the host that a GPU copies at full speed."""

from __future__ import annotations

import numpy as np

from collectives.cuda.device import CudaDevice
from collectives.dlpack import CUDA, ExportedArray


class DeviceMemory:
    """Memory of a GPU: of this process, or opened by the handle of another one.

    Args:
        device: where it lies.
        nbytes: its size.
        handle: of memory of another process; default: memory is allocated.

    Attributes:
        address: where it begins; 0 once it is closed.
        nbytes: its size.

    Raises:
        CudaError: there is not as much memory, or the handle cannot be opened.
    """

    def __init__(self, device: CudaDevice, nbytes: int, handle: bytes = b"") -> None:
        self._device = device
        self._is_owned = not handle
        self.nbytes = nbytes
        self.address = device.open(handle) if handle else device.allocate(nbytes)

    @property
    def handle(self) -> bytes:
        """Its name for other processes of this host."""
        return self._device.handle_of(self.address)

    def array(self, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> ExportedArray:
        """Return an array in this memory, for a framework to import.

        Args:
            shape: of the array.
            dtype: of its elements.
            start: the byte where it begins.
        """
        return ExportedArray(self.address + start, shape, dtype, (CUDA, self._device.ordinal))

    def close(self) -> None:
        """Give it back; what frameworks have imported of it must not be used any more."""
        address, self.address = self.address, 0
        if address:
            (self._device.free if self._is_owned else self._device.close_handle)(address)


class PageLocked:
    """Memory of the host whose pages are locked as long as this lives.

    Args:
        device: the GPU whose driver locks them.
        array: contiguous; kept alive until `close`.

    Raises:
        CudaError: the driver refuses: the limit on locked memory is too low, say, or the pages are locked already.
    """

    def __init__(self, device: CudaDevice, array: np.ndarray) -> None:
        self._device = device
        self.array = array
        self.address: int = array.__array_interface__["data"][0]
        device.page_lock(self.address, array.nbytes)
        self._is_locked = True

    def close(self) -> None:
        """Unlock the pages; a second call does nothing."""
        if self._is_locked:
            self._is_locked = False
            self._device.page_unlock(self.address)
