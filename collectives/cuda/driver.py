"""The CUDA driver (`libcuda.so.1`) through ctypes; every program that uses a GPU has loaded it.

Functions have the names of the driver's header `cuda.h`, which describes their arguments. Like JAX and PyTorch, this
module uses the primary context of a device.
"""

from __future__ import annotations

import ctypes
import logging
import uuid
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from collectives.dlpack import CUDA
from collectives.errors import CudaError

logger = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_NAME_BYTES = 256
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: there is no GPU, or CUDA_VISIBLE_DEVICES hides all of them


class IpcHandle(ctypes.Structure):
    """A handle of device memory that other processes of the host can open."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


_ADDRESS = c_uint64  # CUdeviceptr
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDRESS), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
}
"""The functions in use, with their argument types; each returns 0 or an error number."""


class Driver:
    """The driver's functions, with every return code checked.

    Args:
        library: Library with the functions of `ARGUMENTS`.
        kind: DLPack's device type of its devices.
    """

    def __init__(self, library: Any, kind: int = CUDA) -> None:
        self.kind = kind
        self._functions: dict[str, Any] = {}
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver.

        Args:
            name: Name of the function, a key of `ARGUMENTS`.
            arguments: Arguments of the function.

        Raises:
            CudaError: The function returned an error; the message has the driver's name of the error.
        """
        code = self._functions[name](*arguments)
        if code:
            raise CudaError(
                f"{name} of the CUDA driver failed: {self._text('cuGetErrorName', code)} ({code}), "
                f"{self._text('cuGetErrorString', code)}",
                code,
            )

    def _text(self, function: str, code: int) -> str:
        found = c_char_p()
        self._functions[function](code, ctypes.byref(found))
        return found.value.decode() if found.value else "unknown error"


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees.

    Attributes:
        uuid: Identifier as `nvidia-smi -L` prints it, the same in every process.
        name: Product name.
    """

    uuid: str
    name: str


@cache
def loaded_driver() -> Driver | None:
    """Load and initialise the driver; return None if it is not installed or this process sees no GPU.

    `cuInit` reads CUDA_VISIBLE_DEVICES once, in this call. No context is created. A process forked from this one cannot
    use GPUs.
    """
    try:
        driver = Driver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        logger.debug("no CUDA driver: %s", error)
        return None
    try:
        driver.call("cuInit", 0)
    except CudaError as error:
        level = logging.DEBUG if error.code == _NO_DEVICE else logging.WARNING
        logger.log(level, "no GPU: %s", error)
        return None
    return driver


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees, in order of their numbers; empty without a driver or a GPU.

    The call creates no context and takes no memory on a GPU. JAX and PyTorch may start afterwards.
    """
    driver = loaded_driver()
    return () if driver is None else gpus_of(driver)


def gpus_of(driver: Driver) -> tuple[Gpu, ...]:
    """Return the GPUs that an initialised driver shows.

    Args:
        driver: Driver from `loaded_driver`.

    Raises:
        CudaError: A call of the driver failed.
    """
    count = c_int()
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    return tuple(_gpu(driver, ordinal) for ordinal in range(count.value))


def _gpu(driver: Driver, ordinal: int) -> Gpu:
    device, name, found = c_int(), ctypes.create_string_buffer(_NAME_BYTES), _Uuid()
    driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
    driver.call("cuDeviceGetName", name, _NAME_BYTES, device)
    driver.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
    return Gpu(f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}", name.value.decode(errors="replace"))
