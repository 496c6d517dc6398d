"""A rank of an MPI job that compares means through windows with those of the host.

Call `window_path_job.py FOLDER LIBRARY...`: it prints a line for each library with the spreads of replicas and the
differences of each.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cuda_fake import FakeLibrary

import collectives
from collectives.cuda.device import CudaDevice
from collectives.cuda.driver import Driver
from collectives.cuda.regions import CudaMemory
from collectives.dlpack import CPU, ExportedArray
from collectives.mapped import MappedMemory
from collectives.plans.spread import Spread
from collectives.reduction import Reduction
from collectives.shared_memory.host_regions import HostMemory
from collectives.tree import TreeNode
from strategies.exchange.flat import FlatLayout
from strategies.exchange.host_copies import HostCopies, HostSums, Source
from strategies.exchange.means import Bucket, Means
from strategies.exchange.window_path import WindowPath

SPREADS = ((2, 2), (3, 2), (1, 1), (1, 2, 3), (1, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2), (1, 1, 1, 1))
OF_FRAMEWORKS = ((3, 2), (1, 1, 1))
FLOAT32, BFLOAT16, FLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
BUFFERS = ((3, FLOAT32), (0, FLOAT32), (70_001, FLOAT32), (1001, BFLOAT16), (0, FLOAT16), (64, BFLOAT16), (5, FLOAT16))
ONLY = ((128, FLOAT32),)
"""A bucket that is one buffer without a gap."""


class NumpyViews:
    """NumPy arrays in mapped memory, which is that of the host."""

    def view(self, array: ExportedArray) -> np.ndarray:
        return np.frombuffer((ctypes.c_char * array.nbytes).from_address(array.address), array.dtype)

    def addresses(self, arrays: Sequence[np.ndarray]) -> list[int]:
        return [array.__array_interface__["data"][0] for array in arrays]

    def dtype_of(self, array: np.ndarray) -> np.dtype:
        return array.dtype

    def taken(self, view: np.ndarray, starts: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
        return [view[start : start + size].copy() for start, size in zip(starts, sizes, strict=True)]

    def stacked(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(rows)


class NumpyArithmetic:
    """The arithmetic of the host."""

    def mean(self, nodes: Sequence[TreeNode], sums: Sequence[np.ndarray], dtype: np.dtype, replicas: int) -> np.ndarray:
        out = np.empty(sums[0].size, dtype)
        Reduction("mean", dtype).reduce(sums, out, replicas, tuple(nodes))
        return out


def with_numpy(folder: Path) -> tuple[Callable[[], MappedMemory], Any, Any, Callable[[np.ndarray], Any]]:
    return HostMemory, NumpyArithmetic(), NumpyViews(), np.array


def with_driver(folder: Path) -> tuple[Callable[[], MappedMemory], Any, Any, Callable[[np.ndarray], Any]]:
    library = FakeLibrary(folder)
    return lambda: CudaMemory(CudaDevice(0, Driver(library))), NumpyArithmetic(), NumpyViews(), np.array


def with_jax(folder: Path) -> tuple[Callable[[], MappedMemory], Any, Any, Callable[[np.ndarray], Any]]:
    import jax
    import jax.numpy as jnp

    from strategies.jax.on_device.paths import JaxArithmetic, JaxViews

    return HostMemory, JaxArithmetic(), JaxViews(jax.devices()[0]), jnp.array


def with_torch(folder: Path) -> tuple[Callable[[], MappedMemory], Any, Any, Callable[[np.ndarray], Any]]:
    from strategies.torch.tensors import TorchArithmetic, TorchViews, as_tensor

    return HostMemory, TorchArithmetic(), TorchViews(), lambda array: as_tensor(array).clone()


LIBRARIES = {"numpy": with_numpy, "driver": with_driver, "jax": with_jax, "torch": with_torch}


def host_array(array: Any) -> np.ndarray:
    if hasattr(array, "data_ptr"):
        from strategies.torch.tensors import as_array

        return as_array(array)
    return np.asarray(array)


def sums_of(nodes: Sequence[TreeNode], values: dict[int, np.ndarray]) -> list[np.ndarray]:
    found = []
    for node in nodes:
        of_node = [values[replica] for replica in range(*node)]
        reduction = Reduction("mean", of_node[0].dtype)
        into = np.empty(of_node[0].size, reduction.dtype_of(node))
        reduction.fold(of_node, into)
        found.append(into)
    return found


def differences(
    communicator: collectives.Communicator, counts: tuple[int, ...], library: str, folder: Path
) -> list[str]:
    """Return the buffers whose means have other bits than those of the host, in several buckets."""
    make_memory, arithmetic, views, new = LIBRARIES[library](folder)
    spread = Spread.together(counts)
    path = WindowPath(spread, communicator, make_memory(), arithmetic, views)
    wrong, kept = [], []
    for seed, (name, buffers) in enumerate((("one", BUFFERS), ("two", ONLY), ("one", BUFFERS))):
        sums, wanted = [], []
        for number, (size, dtype) in enumerate(buffers):
            values = {
                replica: np.random.default_rng([seed, number, replica]).standard_normal(size).astype(dtype)
                for replica in range(*spread.blocks[communicator.rank])
            }
            sums.append([new(one) for one in sums_of(path.nodes, values)])
            wanted.append(communicator.ordered_all_reduce(list(values.values()), None, "mean", name="of the host"))
        kept.append((wanted, path.means(name, sums, [dtype for _, dtype in buffers])))
    rows = path.gather("rows", new(np.full(5, communicator.rank, FLOAT32)))
    if not (host_array(rows) == np.arange(spread.size)[:, None]).all():
        wrong.append("rows")
    path.close()
    for bucket, (wanted, found) in enumerate(kept):  # earlier ones too: later ones must not overwrite them
        for number, (want, got) in enumerate(zip(wanted, map(host_array, found), strict=True)):
            if (want.dtype, want.tobytes()) != (got.dtype, got.tobytes()):
                wrong.append(f"{bucket}/{number}")
    return wrong


def differences_of_sums(communicator: collectives.Communicator, counts: Sequence[int], folder: Path) -> list[str]:
    """Return the buffers that differ if instances add a driver's copies in shared memory of the host."""
    layout = FlatLayout(((300_001,), (70_001,), (1001,), (700_000,)), (FLOAT32, FLOAT32, BFLOAT16, FLOAT16), 3)
    bucket = Bucket.of("sums", layout, communicator.allocate, {}, {})
    copies, means = HostCopies(CudaDevice(0, Driver(FakeLibrary(folder), CPU))), Means(communicator)
    on_device = copies.means(bucket.results)
    sums = HostSums(communicator, counts, layout.buffers)
    assert [sums.can_add(result) for result in bucket.results] == [True, True, False, True]
    wrong = []
    for seed in range(2):
        random = np.random.default_rng([seed, communicator.rank])
        given = [
            [random.standard_normal(buffer.size).astype(buffer.dtype) for _ in range(counts[communicator.rank])]
            for buffer in layout.buffers
        ]
        means.reduce(bucket, given)
        expected = [result.tobytes() for result in bucket.results]
        communicator.barrier()
        for result in bucket.results:
            result[...] = 0
        communicator.barrier()
        sources = [[Source(one.__array_interface__["data"][0], one.size, one.dtype) for one in each] for each in given]
        means.reduce(bucket, copies.fetch("sums", sources, lambda number, mean: on_device.begin(mean), sums))
        on_device.wait()
        for number, (want, result) in enumerate(zip(expected, bucket.results, strict=True)):
            exported = on_device.on_device(result)
            assert exported is not None
            if want != result.tobytes() or want != NumpyViews().view(exported).tobytes():
                wrong.append(f"{seed}/{number}")
        communicator.barrier()
    return wrong


def main(folder: Path, libraries: Sequence[str]) -> None:
    with collectives.connect("mpi") as communicator:
        groups = {size: communicator.subgroup(range(size)) for size in (2, 3, 4) if communicator.rank < size}
        for library in libraries:
            found = []
            for counts in OF_FRAMEWORKS if library in ("jax", "torch") else SPREADS:
                if len(counts) in groups:
                    group = groups[len(counts)]
                    if library == "sums":
                        wrong = differences_of_sums(group, counts, folder)
                    else:
                        wrong = differences(group, counts, library, folder)
                    found.append(f"{counts} {'differs in ' + ', '.join(wrong) if wrong else 'equal'}")
            sys.stdout.write(f"{library} {communicator.rank}: {'; '.join(found)}\n")
            sys.stdout.flush()
        communicator.barrier()
        for group in groups.values():
            group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
