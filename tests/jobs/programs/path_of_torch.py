"""Program whose instances exchange gradients over PyTorch's collectives: `path_of_torch.py`, with three ranks of
mpirun.

Prints a line for each statement that holds; an exception ends the job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import collectives
from collectives import Communicator
from collectives.arrays import bfloat16
from collectives.errors import ClosedError, CollectiveTimeoutError, PeerLostError
from collectives.plans.spread import Spread
from strategies.torch.exchange.paths import TorchCompiledPath
from strategies.torch.tensors import TorchArithmetic, as_array, as_tensor

CPU = torch.device("cpu")
FLOAT32 = np.dtype(np.float32)
MEETING = "compiled exchange of gradients/0"
BUFFERS = [(4099, FLOAT32), (0, FLOAT32), (1, bfloat16), (30_003, bfloat16), (16, FLOAT32), (7_001, FLOAT32)]
BUFFERS += [(11, np.dtype(np.float16)), (33, np.dtype(np.float64))]
SPREADS = {2: [(1, 1), (2, 2), (3, 2)], 3: [(1, 1, 1), (2, 1, 2), (1, 3, 1)]}


def contribution(replica: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Return random numbers, some of them denormal even after the division."""
    drawn = np.random.default_rng([replica, size]).standard_normal(size)
    drawn[: size // 3] *= 1e-40 if dtype != np.float16 else 1e-7
    return drawn.astype(dtype)


def assert_same_means(communicator: Communicator, counts: Sequence[int]) -> None:
    spread = Spread.together(counts)
    rank = communicator.rank
    path, arithmetic = TorchCompiledPath(communicator, spread, CPU), TorchArithmetic()
    for _ in range(2):
        sums, wanted = [], []
        for size, dtype in BUFFERS:
            own = {leaf: contribution(leaf.first, size, dtype) for leaf in spread.leaves(rank)}
            wanted.append(communicator.ordered_all_reduce(list(own.values()), op="mean"))
            of_buffer = []
            for node in path.nodes:
                inside = [leaf for leaf in own if node.covers(leaf)]
                given = [as_tensor(own[leaf].copy()) for leaf in inside]
                of_buffer.append(given[0] if node.is_leaf else arithmetic.total(inside, given))
            sums.append(of_buffer)
        means = path.means("gradients/0", sums, [dtype for _, dtype in BUFFERS])
        for mean, right in zip(means, wanted, strict=True):
            found = as_array(mean)
            assert found.dtype == right.dtype
            assert found.shape == right.shape
            assert found.tobytes() == right.tobytes(), (counts, right.dtype, right.size)
    for own in (np.full(5, rank, np.int16), np.array([rank > 0, True]), np.empty(0, np.float32)):
        gathered = as_array(path.gather("flags", torch.from_numpy(own)))
        assert gathered.tobytes() == communicator.all_gather(own).tobytes()
        assert gathered.shape == (communicator.size, own.size)
    path.close()
    path.close()


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def means_of_one(path: TorchCompiledPath) -> Sequence[torch.Tensor]:
    return path.means("gradients/0", [[torch.ones(100_000)]], [FLOAT32])


def limit_of(path: TorchCompiledPath) -> timedelta:
    """Return how long PyTorch lets a collective of the path wait."""
    return path._backend.options._timeout


def shorten_limit(path: TorchCompiledPath, limit_s: float) -> None:
    """Shorten the limit of a connected path; with a short limit, instances on a busy machine cannot connect."""
    path._limit_s = limit_s
    path._backend._set_default_timeout(timedelta(seconds=limit_s))


def main(communicator: Communicator) -> Iterator[str]:
    rank, size = communicator.rank, communicator.size
    apart = Spread.together((1,) * size)
    TorchCompiledPath(communicator, apart, CPU).close()  # PyTorch starts some threads only once
    communicator.barrier()
    before = tasks()
    for counts in SPREADS[3]:
        assert_same_means(communicator, counts)
    if rank < 2:
        with communicator.subgroup([0, 1]) as two:
            for counts in SPREADS[2]:
                assert_same_means(two, counts)
    yield "same bits"
    end_s = time.monotonic() + 20.0
    while tasks() != before:  # the kernel lists a thread for a moment after it was joined
        assert time.monotonic() < end_s, (tasks(), before)
        time.sleep(0.001)
    yield "no thread left"

    path = TorchCompiledPath(communicator, apart, CPU)
    assert not dist.is_initialized()
    assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} & set(os.environ)
    own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = int(communicator.broadcast(np.array(own_store.port if own_store else 0)))
    store = own_store or dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    own = torch.ones(3)
    dist.all_reduce(own)
    means_of_one(path)
    other = TorchCompiledPath(communicator, apart, CPU)
    means_of_one(other)
    other.close()
    dist.all_reduce(own)
    assert own.tolist() == [size * size] * 3
    assert dist.get_world_size() == size
    dist.destroy_process_group()
    means_of_one(path)
    yield "a group of the program's own is undisturbed"

    if rank == size - 1:
        path.close()
        with raises(ClosedError):
            means_of_one(path)
        communicator.barrier(name=MEETING)
    else:
        with raises(PeerLostError):
            means_of_one(path)
    path.close()
    yield "who has gone is missed"

    path = TorchCompiledPath(communicator, apart, CPU)
    assert limit_of(path) == timedelta(seconds=communicator.limits.timeout_s)
    if rank == 0:
        shorten_limit(path, 1.0)
        with raises(CollectiveTimeoutError):
            means_of_one(path)
    else:
        communicator.barrier(name=MEETING)
    communicator.barrier()
    path.close()
    yield "waits have a limit"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with collectives.connect("mpi") as communicator:
        for held in main(communicator):
            print(held, flush=True)
