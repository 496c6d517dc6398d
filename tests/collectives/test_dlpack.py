"""Arrays that frameworks import without a copy."""

from __future__ import annotations

import mmap

import jax
import ml_dtypes
import numpy as np
import pytest

from collectives.dlpack import CPU, ExportedArray


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32])
def test_an_imported_array_shows_later_writes(dtype: type) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    values = memory[64 : 64 + 6 * np.dtype(dtype).itemsize].view(dtype)
    exported = ExportedArray(values.__array_interface__["data"][0], (2, 3), values.dtype)
    values[:] = 1
    before = jax.dlpack.from_dlpack(exported, copy=False)
    values[:] = np.arange(6)
    assert before.dtype == dtype
    assert np.array_equal(np.array(before), np.arange(6).reshape(2, 3).astype(dtype))
    assert exported.nbytes == values.nbytes


def test_torch_tensors_alias_the_memory() -> None:
    torch = pytest.importorskip("torch")
    values = np.zeros(6, np.float32)
    tensor = torch.from_dlpack(ExportedArray(values.__array_interface__["data"][0], (6,), values.dtype))
    tensor += 1
    assert (values == 1).all()


def test_host_memory_has_no_cuda_array_interface() -> None:
    exported = ExportedArray(64, (1,), np.dtype(np.float32), (CPU, 0))
    assert not hasattr(exported, "__cuda_array_interface__")
