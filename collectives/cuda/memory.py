"""Memory of a GPU that array libraries read in place, and memory of the host that a GPU copies at full speed."""

from __future__ import annotations

import weakref

import numpy as np

from collectives.cuda.device import CudaDevice
from collectives.dlpack import ExportedArray


class DeviceMemory:
    """Memory of a GPU: of this process, or opened by the handle of another one.

    It is given back when nobody holds this object, at the latest; at the end of the process by the driver.

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
        self.nbytes = nbytes
        self.address = device.open(handle) if handle else device.allocate(nbytes)
        self._give_back = weakref.finalize(self, device.close_handle if handle else device.free, self.address)
        self._give_back.atexit = False

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
        return ExportedArray(self.address + start, shape, dtype, self._device.place)

    def close(self) -> None:
        """Give it back; what frameworks have imported of it must not be used any more."""
        self.address = 0
        self._give_back()


class PageLocked:
    """Memory of the host whose pages are locked as long as this object lives.

    Args:
        device: the GPU whose driver locks them.
        array: contiguous; kept alive until `close`.

    Raises:
        CudaError: the driver refuses: the limit on locked memory is too low, say, or the pages are locked already.
    """

    def __init__(self, device: CudaDevice, array: np.ndarray) -> None:
        self.array = array
        address: int = array.__array_interface__["data"][0]
        device.page_lock(address, array.nbytes)
        self._unlock = weakref.finalize(self, device.page_unlock, address)
        self._unlock.atexit = False

    def close(self) -> None:
        """Unlock the pages; a second call does nothing."""
        self._unlock()
