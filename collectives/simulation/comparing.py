"""The reductions to compare for a number of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from collectives.plans.choice import Width
from collectives.plans.network import Network
from collectives.plans.planning import plan_for, possible_ways
from collectives.plans.spread import Spread
from collectives.simulation.run import Outcome, simulate
from collectives.simulation.traffic import Traffic, chain, of_plan, ring

_MOST_MESSAGES = 200_000  # plans with more messages are left out
_PIECES = (1, 8, 32)
_SMALLEST_CHUNK_BYTES = 1 << 15
_CHUNKS_PER_RANK = 48


@dataclass(frozen=True)
class SimulatedJob:
    """The spread and the size of a reduction.

    Attributes:
        hosts: Number of hosts.
        instances_per_host: Number of instances of each host.
        replicas_per_instance: Number of replicas of each instance.
        nbytes: Size of the float32 array in bytes.
    """

    hosts: int
    instances_per_host: int
    replicas_per_instance: int
    nbytes: int

    def __post_init__(self) -> None:
        for name in ("hosts", "instances_per_host", "replicas_per_instance", "nbytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def host_of_ranks(self) -> np.ndarray:
        """The host of each rank."""
        return np.repeat(np.arange(self.hosts), self.instances_per_host)

    @property
    def spread(self) -> Spread:
        """The spread of the replicas over ranks and hosts."""
        hosts = tuple(self.host_of_ranks.tolist())
        return Spread((self.replicas_per_instance,) * len(hosts), hosts)

    def least_s(self, network: Network) -> float:
        """Return a lower bound of the time: a host sends 2 (h - 1) / h of the array, or a rank reads all operands."""
        on_links = 2 * (self.hosts - 1) / self.hosts * self.nbytes / network.bytes_per_s
        ranks = self.hosts * self.instances_per_host
        read = 2 * (ranks - 1) / ranks * self.nbytes / network.memory_bytes_per_s
        return max(on_links, read)


def compared(job: SimulatedJob, network: Network, names: str | tuple[str, ...] = "") -> Iterator[tuple[str, Outcome]]:
    """Yield the chain, the ring, and the tree's plans, each with its best number of pieces.

    Args:
        job: Spread and size of the reduction.
        network: Costs of the network.
        names: Prefixes of the names to yield; default: all.
    """
    hosts = job.host_of_ranks
    chunk = max(_SMALLEST_CHUNK_BYTES, job.nbytes / _CHUNKS_PER_RANK / hosts.size)
    for traffic in (chain(hosts, job.nbytes, chunk), ring(hosts, job.nbytes)):
        if traffic.name.startswith(names):
            yield traffic.name, simulate(traffic, network)
    for way in possible_ways(job.spread):
        if f"tree, {way}".startswith(names) and _is_small(job, way):
            outcomes = [(traffic.name, simulate(traffic, network)) for traffic in _in_pieces(job, way)]
            yield min(outcomes, key=lambda outcome: outcome[1].seconds)


def _is_small(job: SimulatedJob, way: str) -> bool:
    return way != "direct" or 2 * job.hosts**2 * job.instances_per_host <= _MOST_MESSAGES


def _in_pieces(job: SimulatedJob, way: str) -> list[Traffic]:
    plan = plan_for(job.spread, way)
    return [of_plan(plan, job.nbytes // 4, Width(4, 4), pieces) for pieces in _PIECES]
