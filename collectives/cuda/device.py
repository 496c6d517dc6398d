"""A GPU through the CUDA driver: its memory, page-locked host memory, and copies between them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint64, c_void_p

from collectives.cuda.driver import HANDLE_BYTES, Driver, IpcHandle, loaded_driver
from collectives.errors import CudaError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no synchronisation with the default stream
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context
_DISABLE_TIMING = 2


class CudaDevice:
    """A GPU in its primary context, which JAX and PyTorch use too, with a separate stream for copies.

    Any thread may call the methods. Copies are executed in the order of the calls.

    Args:
        ordinal: Number of the GPU among the GPUs that this process sees.
        driver: CUDA driver; default: the driver of this machine.

    Attributes:
        place: Device type and ordinal in DLPack.

    Raises:
        CudaError: There is no driver, or no GPU with this number.
    """

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        found = driver or loaded_driver()
        if found is None:
            raise CudaError(f"GPU {ordinal} was asked for, but this process sees no GPU; exchange on the host")
        self.place = found.kind, ordinal
        self._driver = found
        self._device, self._context, self._stream = c_int(), c_void_p(), c_void_p()
        found.call("cuDeviceGet", byref(self._device), ordinal)
        found.call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuStreamCreate", byref(self._stream), _NON_BLOCKING)

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes of uninitialised memory on the GPU; return the address."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Free memory from `allocate`, after the GPU has finished all pending work."""
        self._call("cuMemFree_v2", address)

    def handle_of(self, address: int) -> bytes:
        """Return the CUDA IPC handle of memory from `allocate`, for other processes of this host."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map memory of another process; return its address here.

        Args:
            handle: Handle from `handle_of` in another process.
        """
        address = c_uint64()
        name = IpcHandle.from_buffer_copy(handle.ljust(HANDLE_BYTES, b"\0"))
        self._call("cuIpcOpenMemHandle_v2", byref(address), name, _LAZY_PEER_ACCESS)
        return address.value

    def close_handle(self, address: int) -> None:
        """Unmap memory that `open` has mapped."""
        self._call("cuIpcCloseMemHandle", address)

    def page_lock(self, address: int, nbytes: int) -> None:
        """Lock pages of host memory, so that copies run at the speed of the bus. This takes about 0.4 ms per MB.

        The memory must stay mapped until `page_unlock`.
        """
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def page_unlock(self, address: int) -> None:
        """Unlock pages that `page_lock` has locked."""
        self._call("cuMemHostUnregister", address)

    # ---- copies

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Start a copy between any two places in GPU or host memory; `synchronize` waits for it.

        Args:
            to: Destination address.
            source: Source address. The source must be complete: the stream waits for no other stream.
            nbytes: Number of bytes.
        """
        self.copy_all([(to, source, nbytes)])

    def copy_all(self, copied: Iterable[tuple[int, int, int]]) -> None:
        """Start several copies; `synchronize` waits for them.

        Args:
            copied: Destination address, source address and number of bytes of each copy.
        """
        with self._current():
            for to, source, nbytes in copied:
                if nbytes:
                    self._driver.call("cuMemcpyAsync", to, source, nbytes, self._stream)

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        self._call("cuStreamSynchronize", self._stream)

    def mark(self) -> CopyMark:
        """Return a mark after all earlier copies. A thread can wait for it while later copies run."""
        event = c_void_p()
        with self._current():
            self._driver.call("cuEventCreate", byref(event), _DISABLE_TIMING)
            self._driver.call("cuEventRecord", event, self._stream)
        return CopyMark(self, event)

    def await_event(self, event: c_void_p) -> None:
        """Wait for an event of the driver, and destroy it."""
        self._call("cuEventSynchronize", event)
        self._call("cuEventDestroy_v2", event)

    def close(self) -> None:
        """Wait for all copies, and release the context. All memory must be freed already."""
        if self._context:
            self.synchronize()
            self._call("cuStreamDestroy_v2", self._stream)
            self._context = c_void_p()
            self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: object) -> None:
        with self._current():
            self._driver.call(name, *arguments)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", byref(ctypes.c_void_p()))


class CopyMark:
    """A position in the sequence of a GPU's copies, from `CudaDevice.mark`."""

    def __init__(self, device: CudaDevice, event: c_void_p) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Wait until the copies before the mark are complete; a second call does nothing."""
        if self._event:
            event, self._event = self._event, c_void_p()
            self._device.await_event(event)
