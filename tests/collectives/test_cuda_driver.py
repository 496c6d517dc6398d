"""The CUDA driver by ctypes, on a driver in host memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_fake import REGISTERED_TWICE, FakeLibrary

from collectives.cuda.driver import Driver, Gpu, gpus_of, visible_gpus
from collectives.errors import CudaError


def test_gpus_have_their_uuid_and_name(tmp_path: Path) -> None:
    library = FakeLibrary(tmp_path, gpus=2)
    uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert gpus_of(Driver(library)) == (Gpu(uuid, "Fake 0"), Gpu(uuid, "Fake 1"))
    assert "cuDevicePrimaryCtxRetain" not in library.calls


def test_an_error_has_the_name_from_the_driver(tmp_path: Path) -> None:
    library = FakeLibrary(tmp_path)
    library.refuses["cuMemHostRegister_v2"] = REGISTERED_TWICE
    with pytest.raises(CudaError, match=r"cuMemHostRegister_v2 .* CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"):
        Driver(library).call("cuMemHostRegister_v2", 1, 2, 0)


def test_no_gpu_is_visible_if_all_are_hidden() -> None:
    program = "from collectives.cuda.driver import visible_gpus; print(visible_gpus())"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-c", program], env=hidden, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "()\n"


def test_gpus_differ_by_their_uuid() -> None:
    gpus = visible_gpus()
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)
