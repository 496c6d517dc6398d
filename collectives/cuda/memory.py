"""GPU memory for array libraries, and page-locked host memory for copies at full speed."""

from __future__ import annotations

import weakref

import numpy as np

from collectives.cuda.device import CudaDevice
from collectives.dlpack import ExportedArray


class DeviceMemory:
    """Memory of a GPU that this process has allocated, or opened by the handle of another process.

    It is freed when this object is closed or garbage-collected; at the end of the process the driver frees it.

    Args:
        device: GPU of the memory.
        nbytes: Size in bytes.
        handle: Handle of another process's memory; default: new memory is allocated.

    Attributes:
        address: Start address; 0 after `close`.
        nbytes: Size in bytes.

    Raises:
        CudaError: The GPU has too little memory, or the handle cannot be opened.
    """

    def __init__(self, device: CudaDevice, nbytes: int, handle: bytes = b"") -> None:
        self._device = device
        self.nbytes = nbytes
        self.address = device.open(handle) if handle else device.allocate(nbytes)
        self._give_back = weakref.finalize(self, device.close_handle if handle else device.free, self.address)
        self._give_back.atexit = False

    @property
    def handle(self) -> bytes:
        """The CUDA IPC handle of the memory, for other processes of this host."""
        return self._device.handle_of(self.address)

    def array(self, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> ExportedArray:
        """Return an array in this memory, for import by a framework.

        Args:
            shape: Shape of the array.
            dtype: Dtype of its elements.
            start: Offset of the array in bytes.
        """
        return ExportedArray(self.address + start, shape, dtype, self._device.place)

    def close(self) -> None:
        """Free the memory. Arrays that frameworks have imported from it must not be used afterwards."""
        self.address = 0
        self._give_back()


class PageLocked:
    """Host memory whose pages are locked until `close`, or until this object is garbage-collected.

    Args:
        device: GPU whose driver locks the pages.
        array: Contiguous array; kept alive until `close`.

    Raises:
        CudaError: The driver refuses, e.g. because the limit of locked memory is too low or the pages are locked
            already.
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
