"""Memory exported to array libraries without a copy: by DLPack, and on GPUs by `__cuda_array_interface__`.

JAX, PyTorch and CuPy import by `from_dlpack`. NumPy cannot export bfloat16 by DLPack, and
the CUDA array interface has no bfloat16.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from collectives.arrays import bfloat16

CPU, CUDA = 1, 2
"""DLPack's device types."""
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_CODE_OF_BFLOAT16 = 4
_CAPSULE = b"dltensor"


class _Tensor(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h, without its shape, which is stored behind it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class ExportedArray:
    """A contiguous array in memory of another owner; the importer must keep that memory alive.

    Writes must be complete before an import: no stream is synchronised.

    Attributes:
        address: Address of the first element.
        shape: Shape of the array.
        dtype: Dtype of its elements.
        device: DLPack's device type, and the device's ordinal.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    device: tuple[int, int] = (CPU, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: object) -> object:
        """Return a capsule with an unversioned tensor; the importer's options are ignored."""
        malloc, free, new_capsule = _functions()
        place = malloc(ctypes.sizeof(_Tensor) + 8 * len(self.shape))
        shape_place = place + ctypes.sizeof(_Tensor)
        (ctypes.c_int64 * len(self.shape)).from_address(shape_place)[:] = list(self.shape)
        tensor = _Tensor.from_address(place)
        tensor.data, (tensor.device_type, tensor.device_id) = self.address, self.device
        tensor.ndim, tensor.shape, tensor.strides = len(self.shape), shape_place, None
        tensor.code = _CODE_OF_BFLOAT16 if self.dtype == bfloat16 else _CODES[self.dtype.kind]
        tensor.bits, tensor.lanes, tensor.byte_offset = 8 * self.dtype.itemsize, 1, 0
        # The importer may free the tensor after the interpreter has ended, so the deleter is a C function: free.
        tensor.manager_ctx, tensor.deleter = None, free
        return new_capsule(place, _CAPSULE, None)

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]:
        """The array as the CUDA array interface (version 3, defined by Numba) describes it.

        Raises:
            AttributeError: The array is in host memory, or the interface lacks its dtype.
        """
        if self.device[0] != CUDA or self.dtype == bfloat16:
            raise AttributeError(f"a {self.dtype} array on device {self.device} has no __cuda_array_interface__")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@cache
def _functions() -> tuple[Callable[..., int], int, Callable[..., object]]:
    """Return `malloc`, the address of `free`, and `PyCapsule_New`."""
    libc = ctypes.CDLL(None)
    malloc, new_capsule = libc.malloc, ctypes.pythonapi.PyCapsule_New
    malloc.argtypes, malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    new_capsule.argtypes, new_capsule.restype = (
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        ctypes.py_object,
    )
    free = ctypes.cast(libc.free, ctypes.c_void_p).value
    assert free is not None
    return malloc, free, new_capsule
