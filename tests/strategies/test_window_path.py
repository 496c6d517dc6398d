"""Means through windows mapped by the instances of a host: the bits of the exchange on the host."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_fake import FakeLibrary
from losing import LIMITS, Lost, run_members, thread_name
from mpi_jobs import in_a_job, mpirun_command, run_job
from tiers import first_of
from window_path_job import FLOAT32, OF_FRAMEWORKS, SPREADS, NumpyArithmetic, NumpyViews

from collectives import BrokenError, Communicator, PeerLostError, Settings, ThreadHub, connect, run_on_threads
from collectives.arrays import bfloat16
from collectives.calls import Call
from collectives.cuda.device import CudaDevice
from collectives.cuda.driver import Driver
from collectives.cuda.regions import CudaMemory
from collectives.errors import MappingError
from collectives.instruments import Instruments
from collectives.plans.spread import Spread
from collectives.shared_memory.host_regions import HostMemory
from strategies.exchange.window_path import WindowLayout, WindowPath, windows_if_possible

PROGRAM = Path(__file__).parent / "programs" / "window_path_job.py"
RANKS = 4


@in_a_job
@pytest.mark.parametrize("libraries", first_of([["numpy", "driver", "sums", "jax"], ["torch"]]), ids="-".join)
def test_means_and_rows_have_the_bits_of_the_host(tmp_path: Path, libraries: list[str]) -> None:
    if "torch" in libraries:
        pytest.importorskip("torch")
    job = run_job(mpirun_command(RANKS, PROGRAM, str(tmp_path), *libraries))
    assert job.returncode == 0, job.stderr
    found = set(job.stdout.splitlines())
    for library in libraries:
        spreads = OF_FRAMEWORKS if library in ("jax", "torch") else SPREADS
        for rank in range(RANKS):
            cases = "; ".join(f"{counts} equal" for counts in spreads if rank < len(counts))
            assert f"{library} {rank}: {cases}" in found, job.stdout


def test_a_single_instance_has_its_own_window() -> None:
    def means(communicator: Communicator) -> np.ndarray:
        path = WindowPath(Spread.together([1]), communicator, HostMemory(), NumpyArithmetic(), NumpyViews())
        (found,) = path.means("all", [[np.arange(5, dtype=np.float32)]], [FLOAT32])
        path.close()
        return np.asarray(found)

    assert (run_on_threads(1, means)[0] == np.arange(5)).all()


def test_a_window_that_cannot_grow_is_not_used_any_more(tmp_path: Path) -> None:
    folder = tmp_path / "windows"
    folder.mkdir()

    def means(communicator: Communicator) -> None:
        path = WindowPath(Spread.together([1]), communicator, HostMemory(folder), NumpyArithmetic(), NumpyViews())
        folder.rmdir()
        for size in (1 << 20, 5):  # the second size would have had room
            with pytest.raises(MappingError, match="cannot share memory"):
                path.means("all", [[np.zeros(size, np.float32)]], [FLOAT32])
        path.close()

    run_on_threads(1, means)


def refusal(communicator: Communicator, memory: HostMemory | CudaMemory) -> str:
    with pytest.raises(MappingError) as error:
        WindowPath(Spread.together([1, 1]), communicator, memory, NumpyArithmetic(), NumpyViews())
    communicator.barrier()
    return str(error.value)


def test_all_instances_raise_the_reason_why_one_has_no_window(tmp_path: Path) -> None:
    folders = [tmp_path, tmp_path / "missing"]
    texts = run_on_threads(2, lambda communicator: refusal(communicator, HostMemory(folders[communicator.rank])))
    assert texts[0] == texts[1]
    assert "instance 1 cannot share memory" in texts[0]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_does_not_request_windows_continues_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def on_rank(communicator: Communicator) -> bool:
        def make() -> WindowPath:
            memory, spread = HostMemory(tmp_path / "missing"), Spread.together([1, 1])
            return WindowPath(spread, communicator, memory, NumpyArithmetic(), NumpyViews())

        with pytest.raises(MappingError):
            windows_if_possible("window", make)
        return windows_if_possible("auto", make) is None

    assert run_on_threads(2, on_rank) == [True, True]
    assert "gradients go through the host: instance 0 cannot share memory" in caplog.text


def test_a_gpu_that_cannot_open_a_handle_is_named_on_all_instances(tmp_path: Path) -> None:
    libraries = [FakeLibrary(tmp_path), FakeLibrary(tmp_path)]
    libraries[0].refuses["cuIpcOpenMemHandle_v2"] = 217

    def on_rank(communicator: Communicator) -> str:
        return refusal(communicator, CudaMemory(CudaDevice(0, Driver(libraries[communicator.rank]))))

    texts = run_on_threads(2, on_rank)
    assert texts[0] == texts[1]
    assert "instance 0 cannot share memory" in texts[0]
    assert "cuIpcOpenMemHandle_v2" in texts[0]
    assert [library.allocations for library in libraries] == [0, 0]


class LostAt:
    """An instrument that loses rank 0 at a collective."""

    def __init__(self, name: str) -> None:
        self._name = name

    def operation_begins(self, number: int, call: Call) -> None:
        if self._name in call.title and threading.current_thread().name == thread_name(0):
            raise Lost


def test_a_window_that_is_missing_after_a_loss_is_a_loss_and_no_refusal(tmp_path: Path) -> None:
    """Survivors make new windows; a refusal would end them."""
    hub = ThreadHub(2)
    settings = Settings(mechanism="ring", limits=LIMITS, progress=Instruments(LostAt("memory cannot be shared")))

    def member(rank: int) -> str:
        communicator = connect("thread", settings, hub=hub, rank=rank)
        memory = HostMemory(tmp_path if rank == 0 else tmp_path / "missing")
        with pytest.raises((PeerLostError, BrokenError)) as error:
            WindowPath(Spread.together([1, 1]), communicator, memory, NumpyArithmetic(), NumpyViews())
        return str(error.value)

    (lost, found) = run_members(hub, member)
    assert lost is None
    assert found is not None
    assert "rank 0" in found


def test_means_replace_sums_of_the_same_width() -> None:
    layout = WindowLayout(Spread.together([3, 2]), [100, 0, 7], [FLOAT32, bfloat16, bfloat16])
    wide, narrow = layout.groups
    assert (wide.numbers, wide.elements, narrow.numbers) == ((0,), 128, (2,))
    assert layout.means[0][0].start == layout.sums[0][0][0].start == 0
    assert [place.start for place in layout.sums[0][0]] == [0, 512]
    assert [place.dtype for place in layout.sums[0][1]] == [np.float32, bfloat16]
    assert layout.means[0][1].start == 1024 + 128 * 4 + 128 * 2


def test_slices_of_instances_are_all_of_a_group() -> None:
    layout = WindowLayout(Spread.together([1, 1, 1]), [1000], [FLOAT32])
    slices = [layout.slice_of(layout.groups[0], rank) for rank in range(3)]
    assert slices == [(0, 384), (384, 704), (704, 1024)]
