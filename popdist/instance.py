"""The identity of an instance: its index in the job, and its block of replicas."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from popdist.errors import InstanceError

Launcher = Literal["poprun", "mpirun", "slurm", "single", "tf_config"]


def this_host() -> str:
    """Return the name of this machine as the kernel knows it."""
    return os.uname().nodename


def replica_block(index: int, count: int, total_replicas: int) -> range:
    """Return the replicas of instance `index`. The `count` instances share them in order, as evenly as possible."""
    share, rest = divmod(total_replicas, count)
    start = index * share + min(index, rest)
    return range(start, start + share + (index < rest))


def replica_blocks(count: int, total_replicas: int) -> list[range]:
    """Return `replica_block` of each of `count` instances."""
    return [replica_block(index, count, total_replicas) for index in range(count)]


@dataclass(frozen=True)
class Instance:
    """One process of a job and its block of replicas.

    Attributes:
        index: Index of this instance, 0..count-1.
        count: Number of instances in the job.
        local_replicas: Number of replicas that this instance drives.
        replica_offset: Global index of its first replica.
        total_replicas: Number of replicas of all instances.
        local_index: Index among the instances of the same host.
        ipus_per_replica: Number of devices that one replica spans.
        uniform: Whether all instances drive the same number of replicas.
        host: Name of the machine that runs this instance.
        launcher: Launcher that started it.

    Raises:
        InstanceError: The numbers contradict each other.
    """

    index: int
    count: int
    local_replicas: int
    replica_offset: int
    total_replicas: int
    local_index: int
    ipus_per_replica: int = 1
    uniform: bool = True
    host: str = field(default_factory=this_host)
    launcher: Launcher = "single"

    def __post_init__(self) -> None:
        for name in ("count", "local_replicas", "total_replicas", "ipus_per_replica"):
            self._require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        self._require(0 <= self.index < self.count, f"index is {self.index}; it must lie in 0..{self.count - 1}")
        self._require(
            0 <= self.local_index < self.count,
            f"local_index is {self.local_index}; it must lie in 0..{self.count - 1}",
        )
        last = self.replica_offset + self.local_replicas
        self._require(
            self.replica_offset >= 0 and last <= self.total_replicas,
            f"replicas {self.replica_offset}..{last - 1} do not lie in 0..{self.total_replicas - 1}",
        )
        if self.uniform:
            self._require_even_division()
        self._require(
            self.launcher in get_args(Launcher),
            f"launcher is {self.launcher!r}; known launchers: {', '.join(get_args(Launcher))}",
        )

    def _require_even_division(self) -> None:
        self._require(
            self.local_replicas * self.count == self.total_replicas,
            f"{self.count} instances with {self.local_replicas} replicas each do not make {self.total_replicas}",
        )
        self._require(
            self.index * self.local_replicas == self.replica_offset,
            f"instance {self.index} with {self.local_replicas} replicas starts at replica "
            f"{self.index * self.local_replicas}, not {self.replica_offset}",
        )

    @staticmethod
    def _require(holds: bool, message: str) -> None:
        if not holds:
            raise InstanceError(message)

    def renumbered(self, index: int, count: int) -> Instance:
        """Return this instance as number `index` of `count` instances that share the replicas as evenly as possible."""
        block = replica_block(index, count, self.total_replicas)
        return replace(
            self,
            index=index,
            count=count,
            local_replicas=len(block),
            replica_offset=block.start,
            local_index=min(self.local_index, index),
            uniform=self.total_replicas % count == 0,
        )

    @property
    def local_replica_range(self) -> range:
        """The global indices of the replicas of this instance."""
        return range(self.replica_offset, self.replica_offset + self.local_replicas)

    @property
    def is_leader(self) -> bool:
        """Whether this is instance 0, which prints and writes files for the job."""
        return self.index == 0
