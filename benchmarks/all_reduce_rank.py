"""What each rank of `all_reduce.py` does; rank 0 writes one line of JSON for each size and number of replicas.

usage: all_reduce_rank.py JOB     (JOB is JSON with the fields of the dataclass)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reductions
from contributions import contribution, sum_checks, tree_sum
from mpi4py import MPI
from timing import medians

WARM_UPS = 3
FEWEST = 3  # reductions in a block


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        sizes: of one replica's array, in bytes.
        local_replicas: how many arrays each rank contributes.
        rounds: how often each way takes its turn.
        block_s: how long a turn lasts, about; as many reductions one after another as that takes.
        stream_bytes: of each of the arrays with which the memory's bandwidth is measured; larger than the caches.
        rendezvous: a file that does not exist yet.
    """

    sizes: Sequence[int]
    local_replicas: Sequence[int]
    rounds: int
    block_s: float
    stream_bytes: int
    rendezvous: str


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    connections = reductions.connect(Path(job.rendezvous))
    stream = make_stream(job.stream_bytes)
    for nbytes in job.sizes:
        for count in job.local_replicas:
            row = measure(job, connections, stream, nbytes, count)
            if connections.mpi.rank == 0:
                print(json.dumps(row), flush=True)
    reductions.disconnect(connections)


def measure(
    job: Job, connections: reductions.Connections, stream: Callable[[], Any], nbytes: int, count: int
) -> dict[str, Any]:
    """One row: every way takes its turn in each of the rounds."""
    comm = connections.mpi
    elements = nbytes // 4
    contributions = [contribution(comm.rank * count + number, elements) for number in range(count)]
    expected = tree_sum(comm.size * count, elements)
    ways = {name: reductions.WAYS[name](connections, contributions) for name in reductions.available_ways(connections)}
    checks = {name: check(comm, reduce(), expected) for name, reduce in ways.items()}
    turns: dict[str, Callable[[], Any]] = {**ways, "stream": stream}
    repeats = {name: affordable_repeats(comm, turn, job.block_s) for name, turn in turns.items()}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(job.rounds):
        for name, turn in turns.items():
            times[name].append(1e3 * timed(comm, turn, repeats[name]))
    middle = medians(times)
    bandwidth = 3 * job.stream_bytes * comm.size / (middle["stream"] * 1e-3)
    return {
        "bytes": nbytes,
        "local_replicas": count,
        "instances": comm.size,
        "bandwidth_gb_per_s": bandwidth * 1e-9,
        "bound_ms": 1e3 * (comm.size * count + 1) * nbytes / bandwidth,
        "ways": {
            name: {
                "ms": middle[name],
                "times_faster_than_mpi": middle["mpi"] / middle[name],
                "rounds_ms": times[name],
                **checks[name],
            }
            for name in ways
        },
    }


def check(comm: MPI.Intracomm, result: np.ndarray, expected: np.ndarray) -> dict[str, bool]:
    """Whether the result is right on all ranks: to the last bit, and but for rounding."""
    return {name: comm.allreduce(holds, MPI.LAND) for name, holds in sum_checks(result, expected).items()}


def make_stream(nbytes: int) -> Callable[[], np.ndarray]:
    """A sum that reads two arrays and writes a third one, all larger than the caches."""
    first, second, out = (np.full(nbytes // 4, value, np.float32) for value in (1, 2, 0))
    return lambda: np.add(first, second, out)


def affordable_repeats(comm: MPI.Intracomm, turn: Callable[[], Any], block_s: float) -> int:
    """How many calls take about `block_s`; the same on all ranks."""
    repeats = FEWEST
    while (seconds := repeats * timed(comm, turn, repeats)) < block_s / 4:
        repeats *= 4
    return max(FEWEST, round(repeats * block_s / seconds))


def timed(comm: MPI.Intracomm, turn: Callable[[], Any], repeats: int) -> float:
    """Seconds per call of the slowest rank, of `repeats` calls one after another."""
    for _ in range(min(WARM_UPS, repeats)):
        turn()
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        turn()
    return comm.allreduce(time.perf_counter() - began, MPI.MAX) / repeats


if __name__ == "__main__":
    main()
