"""Memory of the CUDA driver, on a driver in host memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_fake import FakeLibrary

from collectives.cuda.device import CudaDevice
from collectives.cuda.driver import Driver
from collectives.cuda.memory import DeviceMemory, PageLocked
from collectives.errors import CudaError


def address_of(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@pytest.fixture
def library(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path)


@pytest.fixture
def device(library: FakeLibrary) -> CudaDevice:
    return CudaDevice(0, Driver(library))


def test_written_memory_is_read_through_its_handle(library: FakeLibrary, device: CudaDevice) -> None:
    written, read = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    memory = DeviceMemory(device, written.nbytes)
    device.copy(memory.address, address_of(written), written.nbytes)
    opened = DeviceMemory(device, written.nbytes, memory.handle)
    device.copy(address_of(read), opened.address, read.nbytes)
    device.synchronize()
    assert (read == written).all()
    opened.close()
    memory.close()
    memory.close()
    assert library.allocations == 0
    assert {"cuIpcCloseMemHandle", "cuMemFree_v2"} <= set(library.calls)


def test_an_array_has_the_cuda_array_interface(device: CudaDevice) -> None:
    memory = DeviceMemory(device, 4096)
    array = memory.array((3, 5), np.dtype(np.float32), 256)
    interface = array.__cuda_array_interface__
    assert interface["data"] == (memory.address + 256, False)
    assert (interface["shape"], interface["typestr"], interface["version"]) == ((3, 5), "<f4", 3)
    assert array.__dlpack_device__() == (2, 0)
    memory.close()


def test_pages_are_locked_once_and_unlocked_at_close(library: FakeLibrary, device: CudaDevice) -> None:
    array = np.zeros(1 << 16, np.uint8)
    locked = PageLocked(device, array)
    assert library.registered == {address_of(array): array.nbytes}
    with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
        PageLocked(device, array)
    locked.close()
    locked.close()
    assert library.registered == {}


def test_a_mark_waits_once(library: FakeLibrary, device: CudaDevice) -> None:
    mark = device.mark()
    mark.wait()
    mark.wait()
    assert library.calls.count("cuEventSynchronize") == 1


def test_every_call_restores_the_context(library: FakeLibrary, device: CudaDevice) -> None:
    library.refuses["cuMemAlloc_v2"] = 2
    with pytest.raises(CudaError, match="cuMemAlloc_v2"):
        DeviceMemory(device, 8)
    device.close()
    assert library.calls.count("cuCtxPushCurrent_v2") == library.calls.count("cuCtxPopCurrent_v2")
    assert library.calls.count("cuDevicePrimaryCtxRelease_v2") == 1
