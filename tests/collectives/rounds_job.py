"""One rank of an MPI job that reduces into the same allocated memory repeatedly and prints the wrong results."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import collectives

ROUNDS = 1000
LENGTHS = (100, 757, 5000, 20_000)
REPLICAS = 2


def main() -> None:
    with collectives.connect("mpi", collectives.Settings(mechanism="window")) as communicator:
        for length in LENGTHS:
            out = communicator.allocate((length,), np.float32)
            wrong = sum(not is_right(communicator, out, number) for number in range(ROUNDS))
            print(f"{wrong} of {ROUNDS} wrong with {length} elements on rank {communicator.rank}", flush=True)


def is_right(communicator: collectives.Communicator, out: np.ndarray, number: int) -> bool:
    """Return whether one more reduction, of values that depend on the round, is right on this rank."""
    replicas = [number + replica for replica in range(REPLICAS * communicator.size)]
    mine = replicas[communicator.rank * REPLICAS :][:REPLICAS]
    communicator.ordered_all_reduce([np.full(out.shape, value, np.float32) for value in mine], out)
    return bool((out == sum(replicas)).all())


if __name__ == "__main__":
    assert MPI.Is_initialized()
    main()
