"""GPU memory that several processes map by CUDA IPC, for computations of frameworks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from typing_extensions import override

from collectives.cuda.device import CudaDevice
from collectives.cuda.memory import DeviceMemory
from collectives.mapped import Copied, MappedMemory, Region

_BLOCK_BYTES = 1 << 21  # the driver packs smaller allocations into one block, and a handle would expose all of it


@final
class CudaMemory(MappedMemory):
    """Memory of a GPU, shared by CUDA IPC handles.

    Args:
        device: GPU of this process. Other processes may use the same GPU, or one that can access it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    @override
    def make(self, nbytes: int) -> tuple[Region, bytes]:
        memory = DeviceMemory(self._device, -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        try:
            return memory, memory.handle
        except BaseException:
            memory.close()
            raise

    @override
    def open(self, handle: bytes, nbytes: int) -> Region:
        return DeviceMemory(self._device, nbytes, handle)

    @override
    def settle(self) -> None:
        """Do nothing: a CUDA IPC handle holds no resources."""

    @override
    def copy(self, copied: Iterable[Copied]) -> None:
        self._device.copy_all(copied)
        self._device.synchronize()

    @override
    def close(self) -> None:
        self._device.close()
