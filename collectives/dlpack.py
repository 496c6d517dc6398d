"""Memory as array libraries take it over without a copy: by DLPack, and on GPUs by `__cuda_array_interface__`.

JAX, PyTorch and CuPy have a `from_dlpack`. NumPy exports no bfloat16 by DLPack, and the CUDA array interface has none.
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
"""DLPack's kinds of devices."""
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_CODE_OF_BFLOAT16 = 4
_CAPSULE = b"dltensor"


class _Tensor(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h, up to its shape, which follows."""

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
    """A contiguous array in memory that somebody else owns: whoever imports it keeps that memory alive.

    What was written there must be complete when the array is imported; nobody waits for a stream.

    Attributes:
        address: of the first element.
        shape: of the array.
        dtype: of its elements.
        device: its kind in DLPack, and its ordinal.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    device: tuple[int, int] = (CPU, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: object) -> object:
        """Return a capsule with an unversioned tensor, whatever the importer asks for."""
        malloc, free, new_capsule = _functions()
        place = malloc(ctypes.sizeof(_Tensor) + 8 * len(self.shape))
        shape_place = place + ctypes.sizeof(_Tensor)
        (ctypes.c_int64 * len(self.shape)).from_address(shape_place)[:] = list(self.shape)
        tensor = _Tensor.from_address(place)
        tensor.data, (tensor.device_type, tensor.device_id) = self.address, self.device
        tensor.ndim, tensor.shape, tensor.strides = len(self.shape), shape_place, None
        tensor.code = _CODE_OF_BFLOAT16 if self.dtype == bfloat16 else _CODES[self.dtype.kind]
        tensor.bits, tensor.lanes, tensor.byte_offset = 8 * self.dtype.itemsize, 1, 0
        # The importer frees the tensor, long after this object: by a function of C, since Python may have ended.
        tensor.manager_ctx, tensor.deleter = None, free
        return new_capsule(place, _CAPSULE, None)

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]:
        """The array as Numba's interface describes it.

        Raises:
            AttributeError: if it lies on the host, or has a dtype that the interface lacks.
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
        """The bytes of all elements."""
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
