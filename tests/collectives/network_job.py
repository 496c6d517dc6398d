"""One rank of an MPI job with given costs of messages: first different ones on each rank, then equal ones."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import collectives
from collectives.plans.network import Network


def main(rank: int) -> None:
    try:
        collectives.connect("mpi", collectives.Settings(network=Network(latency_s=rank)))
    except collectives.PeerRefusedError as error:
        print(f"rank {rank} is refused: {error}", flush=True)
    with collectives.connect("mpi", collectives.Settings(mechanism="ring", network=Network())) as communicator:
        total = communicator.ordered_all_reduce([np.full(100_000, rank + 1.0)])
        print(f"rank {rank} has {total.min()} to {total.max()}", flush=True)


if __name__ == "__main__":
    main(MPI.COMM_WORLD.Get_rank())
