"""A CUDA driver in host memory: the part of `libcuda.so.1` that `collectives.cuda` uses, for machines without a GPU.

Each allocation is a file in a folder, so that a handle means the same in other processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, memmove
from pathlib import Path
from typing import Any

from collectives.cuda.driver import ARGUMENTS, HANDLE_BYTES

INVALID_VALUE, REGISTERED_TWICE = 1, 712
NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", REGISTERED_TWICE: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}
UUID = bytes(range(16))


def _u64(pointer: Any, value: int) -> int:
    pointer[0] = value
    return 0


class FakeLibrary:
    """The functions of the driver in the form of ctypes; unknown functions succeed and do nothing.

    Attributes:
        registered: The sizes of page-locked memory by address.
        refuses: Error numbers by the names of functions that fail with them.
        calls: The names of the called functions, in order.
    """

    def __init__(self, folder: Path, gpus: int = 1) -> None:
        self._folder, self._gpus = folder, gpus
        self._memory: dict[int, tuple[mmap.mmap, bytes]] = {}
        self.registered: dict[int, int] = {}
        self.refuses: dict[str, int] = {}
        self.calls: list[str] = []
        for name, arguments in ARGUMENTS.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(self._counted(name)))

    def _counted(self, name: str) -> Callable[..., int]:
        function = getattr(self, f"_{name}", lambda *arguments: 0)

        def counted(*arguments: Any) -> int:
            self.calls.append(name)
            return self.refuses.get(name) or function(*arguments)

        return counted

    @property
    def allocations(self) -> int:
        """The number of regions that are allocated or opened."""
        return len(self._memory)

    def _cuGetErrorName(self, code: int, found: Any) -> int:
        found[0] = NAMES.get(code, b"CUDA_ERROR_UNKNOWN")
        return 0

    def _cuDeviceGetCount(self, count: Any) -> int:
        return _u64(count, self._gpus)

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return _u64(device, ordinal)

    def _cuDeviceGetName(self, name: Any, nbytes: int, device: int) -> int:
        text = b"Fake %d" % device
        memmove(name, text, len(text))
        return 0

    def _cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> int:
        uuid[0].bytes[:] = UUID
        return 0

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        return _u64(context, 1)

    def _cuEventCreate(self, event: Any, flags: int) -> int:
        return _u64(event, 1)

    def _cuMemAlloc_v2(self, pointer: Any, nbytes: int) -> int:
        name = secrets.token_hex(8).encode()
        with (self._folder / name.decode()).open("x+b") as file:
            file.truncate(nbytes)
            return self._map(file.fileno(), name, pointer)

    def _map(self, descriptor: int, name: bytes, pointer: Any) -> int:
        memory = mmap.mmap(descriptor, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory, name
        return _u64(pointer, address)

    def _cuMemFree_v2(self, address: int) -> int:
        if address in self._memory:
            (self._folder / self._memory[address][1].decode()).unlink()
        return self._cuIpcCloseMemHandle(address)

    def _cuIpcCloseMemHandle(self, address: int) -> int:
        return 0 if self._memory.pop(address, None) else INVALID_VALUE

    def _cuMemcpyAsync(self, to: int, source: int, nbytes: int, stream: int) -> int:
        memmove(to, source, nbytes)
        return 0

    def _cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> int:
        if address in self.registered:
            return REGISTERED_TWICE
        self.registered[address] = nbytes
        return 0

    def _cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else INVALID_VALUE

    def _cuIpcGetMemHandle(self, handle: Any, address: int) -> int:
        if address not in self._memory:
            return INVALID_VALUE
        name = self._memory[address][1].ljust(HANDLE_BYTES, b"\0")
        memmove(handle, name, HANDLE_BYTES)
        return 0

    def _cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: int) -> int:
        name = bytes(handle.reserved).rstrip(b"\0")
        descriptor = os.open(self._folder / name.decode(), os.O_RDWR)
        try:
            return self._map(descriptor, name, pointer)
        finally:
            os.close(descriptor)
