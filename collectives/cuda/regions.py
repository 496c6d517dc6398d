"""Memory of a GPU that several processes map by CUDA IPC, in which frameworks compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from collectives.cuda.device import CudaDevice
from collectives.cuda.memory import DeviceMemory
from collectives.mapped import Copied, MappedMemory, Region

_BLOCK_BYTES = 1 << 21  # the driver cuts smaller allocations from a block, all of which a handle would show


@final
class CudaMemory(MappedMemory):
    """Memory of a GPU; a handle is one of CUDA IPC.

    Args:
        device: the GPU on which this process computes. Others may compute on the same one, or on one that reaches it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def make(self, nbytes: int) -> tuple[Region, bytes]:
        """See `MappedMemory`."""
        memory = DeviceMemory(self._device, -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        try:
            return memory, memory.handle
        except BaseException:
            memory.close()
            raise

    def open(self, handle: bytes, nbytes: int) -> Region:
        """See `MappedMemory`."""
        return DeviceMemory(self._device, nbytes, handle)

    def settle(self) -> None:
        """See `MappedMemory`; a handle takes nothing."""

    def copy(self, copied: Iterable[Copied]) -> None:
        """See `MappedMemory`."""
        self._device.copy_all(copied)
        self._device.synchronize()

    def close(self) -> None:
        """See `MappedMemory`."""
        self._device.close()
