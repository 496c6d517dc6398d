"""A GPU by the CUDA driver: its memory, page-locked memory of the host, and copies between all of these."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint64, c_void_p

from collectives.cuda.driver import HANDLE_BYTES, Driver, IpcHandle, loaded_driver
from collectives.errors import CudaError

_NON_BLOCKING = 1  # the stream does not wait for the default stream, nor that for it
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1  # page-locked for every context
_DISABLE_TIMING = 2


class CudaDevice:
    """A GPU in its primary context, in which JAX and PyTorch compute, and a stream of its own for copies.

    Methods may be called by any thread; copies are made in the order in which they were asked for.

    Args:
        ordinal: of the GPU among those that this process sees.
        driver: default: that of this machine.

    Attributes:
        place: the device in DLPack.

    Raises:
        CudaError: there is no driver, or no such GPU.
    """

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        found = driver or loaded_driver()
        if found is None:
            raise CudaError(f"GPU {ordinal} was asked for, and this process sees none; exchange on the host")
        self.place = found.kind, ordinal
        self._driver = found
        self._device, self._context, self._stream = c_int(), c_void_p(), c_void_p()
        found.call("cuDeviceGet", byref(self._device), ordinal)
        found.call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuStreamCreate", byref(self._stream), _NON_BLOCKING)

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Return the address of so many bytes on the GPU, not zeroed."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Give back what `allocate` has returned, when the GPU has done all that was asked of it."""
        self._call("cuMemFree_v2", address)

    def handle_of(self, address: int) -> bytes:
        """Return a name of what `allocate` has returned, for other processes of this host."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map memory of another process; return its address here.

        Args:
            handle: see `handle_of`; not of this process.
        """
        address = c_uint64()
        name = IpcHandle.from_buffer_copy(handle.ljust(HANDLE_BYTES, b"\0"))
        self._call("cuIpcOpenMemHandle_v2", byref(address), name, _LAZY_PEER_ACCESS)
        return address.value

    def close_handle(self, address: int) -> None:
        """Unmap what `open` has returned."""
        self._call("cuIpcCloseMemHandle", address)

    def page_lock(self, address: int, nbytes: int) -> None:
        """Lock the pages of host memory, so that copies run at the speed of the bus. About 0.4 ms per MB.

        The memory must not be unmapped before `page_unlock`.
        """
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def page_unlock(self, address: int) -> None:
        """Undo `page_lock`."""
        self._call("cuMemHostUnregister", address)

    # ---- copies

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Begin to copy between any two places of GPUs and of the host; see `synchronize`.

        Args:
            to: the address of the copy.
            source: finished memory; this stream waits for no other.
            nbytes: how much.
        """
        self.copy_all([(to, source, nbytes)])

    def copy_all(self, copied: Iterable[tuple[int, int, int]]) -> None:
        """Begin several copies; see `copy`.

        Args:
            copied: for each its address, its source, and the number of bytes.
        """
        with self._current():
            for to, source, nbytes in copied:
                if nbytes:
                    self._driver.call("cuMemcpyAsync", to, source, nbytes, self._stream)

    def synchronize(self) -> None:
        """Wait until all copies have been made."""
        self._call("cuStreamSynchronize", self._stream)

    def mark(self) -> CopyMark:
        """Return a mark behind the copies so far, for which a thread may wait while later ones are made."""
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
        """Wait for all copies, and let the context go; memory must have been given back before."""
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
    """A place in the order of the copies of a GPU; see `CudaDevice.mark`."""

    def __init__(self, device: CudaDevice, event: c_void_p) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Wait until the copies before it have been made; a second call does nothing."""
        if self._event:
            event, self._event = self._event, c_void_p()
            self._device.await_event(event)
