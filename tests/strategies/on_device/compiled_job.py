"""An instance of an MPI job with connected JAX processes; prints differences from the exchange on the host."""

from __future__ import annotations

import itertools
import signal
import sys

import jax
import ml_dtypes
import numpy as np

import popdist
from collectives import Communicator
from collectives.plans.spread import Spread
from collectives.reduction import Reduction
from collectives.tree import TreeNode
from popdist.instance import replica_blocks
from strategies.jax.on_device.paths import CompiledPath
from strategies.jax.replicas.processes import RuntimeState, connect_processes, runtime_state

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
SIZES = (1, 4099)


def main() -> None:
    popdist.init()
    communicator = popdist.communicator()
    assert runtime_state(communicator.size) == RuntimeState.UNSTARTED
    connect_processes(communicator)
    assert runtime_state(communicator.size) == RuntimeState.CONNECTED
    connect_processes(communicator)  # once is enough
    check("processes", jax.process_count() == communicator.size and jax.process_index() == communicator.rank)
    check("SIGTERM", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    for replicas in (communicator.size, 4, 5):
        check_path(communicator, replicas)
    print(f"{communicator.rank} is done", flush=True)


def check_path(communicator: Communicator, replicas: int) -> None:
    """Compare means of all dtypes and sizes in one bucket, and rows that are gathered."""
    blocks = replica_blocks(communicator.size, replicas)
    path = CompiledPath(Spread.together([len(block) for block in blocks]), communicator, jax.local_devices()[0])
    kinds = [*itertools.product(DTYPES, SIZES), (DTYPES[0], 0)]
    for bucket in ("first", "again"):
        given = [contributions(blocks[path.rank], dtype, size) for dtype, size in kinds]
        sums = [[sum_of(node, of_buffer, blocks[path.rank]) for node in path.nodes] for of_buffer in given]
        means = path.means(bucket, sums, [dtype for dtype, _ in kinds])
        for (dtype, size), of_buffer, mean in zip(kinds, given, means, strict=True):
            wanted = communicator.ordered_all_reduce(of_buffer, op="mean")
            is_same = np.asarray(mean).tobytes() == wanted.tobytes() and mean.dtype == dtype
            check(f"mean of {size} {dtype} of {replicas} replicas", is_same)
            check("device", mean.devices() == {jax.local_devices()[0]})
    rows = path.gather("rows", jax.numpy.arange(3) + path.rank)
    check("rows", np.array_equal(rows, np.arange(3) + np.arange(communicator.size)[:, None]))
    check("no rows", path.gather("none", jax.numpy.zeros(0)).shape == (communicator.size, 0))


def contributions(block: range, dtype: np.dtype, size: int) -> list[np.ndarray]:
    """Return the gradients of replicas in several magnitudes, so that the order of a sum shows."""
    found = []
    for replica in block:
        drawn = np.random.default_rng([replica, size]).standard_normal(size) * 10.0 ** (replica % 3)
        found.append(drawn.astype(np.float32).astype(dtype))
    return found


def sum_of(node: TreeNode, of_replicas: list[np.ndarray], block: range) -> jax.Array:
    """Return the sum of a node, as an engine computes it on the device."""
    mine = [of_replicas[replica - block.start] for replica in range(node.first, node.stop)]
    if node.is_leaf:
        return jax.device_put(mine[0])
    into = np.empty(mine[0].shape, np.float32)
    nodes = tuple(TreeNode(replica, replica + 1) for replica in range(node.first, node.stop))
    Reduction("sum", mine[0].dtype).fold(mine, into, nodes)
    return jax.device_put(into)


def check(what: str, is_so: bool) -> None:
    if not is_so:
        print(f"{what} is wrong", flush=True)


if __name__ == "__main__":
    sys.exit(main())
