"""The part of `all_reduce.py` that compares all-reduces over Horovod with ours over MPI and with `MPI_Allreduce`.

The columns: "window" and "mpi" as in the table for mpi; "horovod" is `collectives.connect("horovod")`; "hvd" adds the
local replicas' arrays and calls Horovod's all-reduce on a tensor of torch, with the settings that Horovod and Open MPI
have by themselves; "tuned" is the same with those of TUNED. A thread of Horovod never sleeps: each of these three has
processes of its own, one core per instance, and they are stopped while it is not their turn.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from control import Coordinator, Group
from horovod_settings import TUNED
from timing import environment, medians, mpirun_command

PROGRAM = Path(__file__).with_name("all_reduce_horovod_rank.py")
COLUMNS = {"window": "window", "mpi": "mpi", "horovod": "horovod", "hvd": "hvd", "hvd_tuned": "tuned"}
KEEPS_ORDER = ("window",)
FEWEST = 3  # reductions in a turn
ANSWER_S = 120.0


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        sizes: of one replica's array, in bytes.
        local_replicas: how many arrays each rank contributes.
        rounds: how often each way takes its turn.
        block_s: how long a turn lasts, about.
    """

    sizes: Sequence[int]
    local_replicas: Sequence[int]
    rounds: int
    block_s: float


class Ways:
    """The processes of all ways; those of window and mpi are the same.

    Args:
        coordinator: starts them.
        cpus: one for each rank.
    """

    def __init__(self, coordinator: Coordinator, cpus: Sequence[str]) -> None:
        over_mpi = _start(coordinator, "mpi", cpus)
        self._groups = {
            "window": over_mpi,
            "mpi": over_mpi,
            "horovod": _start(coordinator, "horovod", cpus),
            "hvd": _start(coordinator, "hvd", cpus),
            "hvd_tuned": _start(coordinator, "hvd", cpus, TUNED),
        }
        self._instances = len(cpus)

    def measure(self, job: Job, nbytes: int, local_replicas: int) -> dict[str, Any]:
        """One row: every way takes its turn in each of the rounds."""
        checks = {way: self._prepare(way, nbytes, local_replicas) for way in self._groups}
        repeats = {way: max(FEWEST, round(job.block_s / self._turn_s(way, FEWEST))) for way in self._groups}
        times: dict[str, list[float]] = {way: [] for way in self._groups}
        for _ in range(job.rounds):
            for way in self._groups:
                times[way].append(1e3 * self._turn_s(way, repeats[way]))
        ms = medians(times)
        return {
            "bytes": nbytes,
            "local_replicas": local_replicas,
            "instances": self._instances,
            "ways": {
                way: {
                    "ms": ms[way],
                    "times_faster_than_mpi": ms["mpi"] / ms[way],
                    "rounds_ms": times[way],
                    **checks[way],
                }
                for way in self._groups
            },
        }

    def _prepare(self, way: str, nbytes: int, local_replicas: int) -> dict[str, bool]:
        """Whether the sum is right on all ranks."""
        of_ranks = self._groups[way].ask(do="prepare", way=way, nbytes=nbytes, local_replicas=local_replicas)
        return {check: all(of_rank[check] for of_rank in of_ranks) for check in of_ranks[0]}

    def _turn_s(self, way: str, repeats: int) -> float:
        """Seconds per all-reduce, on the slowest rank."""
        of_ranks: list[float] = self._groups[way].ask(do="turn", way=way, repeats=repeats)
        return max(of_ranks)


def _start(coordinator: Coordinator, kind: str, cpus: Sequence[str], environ: Mapping[str, str] | None = None) -> Group:
    command = mpirun_command(cpus, [sys.executable, str(PROGRAM), coordinator.path, kind])
    return coordinator.start(kind, len(cpus), [command], environment(**environ or {}), is_restless=kind != "mpi")


def measure(job: Job, cpus: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each size and number of local replicas."""
    with tempfile.TemporaryDirectory(prefix="all-reduce-") as folder, Coordinator(folder, ANSWER_S) as coordinator:
        ways = Ways(coordinator, cpus)
        for nbytes, local_replicas in product(job.sizes, job.local_replicas):
            yield ways.measure(job, nbytes, local_replicas)
