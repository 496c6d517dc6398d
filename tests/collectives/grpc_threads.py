"""Workers over gRPC on threads of this process, for tests that need no separate processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import collectives
from collectives import Communicator, Limits, Settings
from collectives.clock import Clock, FakeClock, RealClock
from collectives.instruments import Instruments
from collectives.network.security import Security
from collectives.network.wire import DaemonThreads
from collectives.plans.network import Network

LIMIT_S = 60.0


@dataclass(frozen=True)
class WorkerThreads:
    """The workers of one group, with their addresses and their security from here and not from the environment.

    Workers of a failed test do not keep this process from ending.

    Attributes:
        addresses: The addresses of all workers.
        security: The default security of workers.
    """

    addresses: Sequence[str]
    security: Security = field(default_factory=Security)
    _threads: DaemonThreads = field(default_factory=DaemonThreads)

    def join(self, rank: int, **changes: Any) -> Future[Communicator]:
        """Connect one worker to the others, in a new thread."""
        return self._threads.submit(self.connect, rank, **changes)

    def connect(
        self,
        rank: int,
        *,
        connect_timeout_s: float = LIMIT_S,
        addresses: Sequence[str] = (),
        security: Security | None = None,
        description: str = "",
        clock: Clock | None = None,
        network: Network | None = None,
        shrinks: bool = False,
        instruments: Instruments | None = None,
    ) -> Communicator:
        """Connect one worker to the others, in this thread."""
        limits = Limits(timeout_s=LIMIT_S, connect_timeout_s=connect_timeout_s, clock=clock or RealClock())
        return collectives.connect(
            "grpc",
            Settings(limits=limits, network=network, progress=instruments or Instruments()),
            addresses=addresses or self.addresses,
            rank=rank,
            description=description,
            security=security or self.security,
            shrinks=shrinks,
        )

    def assert_reduce(self, workers: Sequence[Future[Communicator]]) -> None:
        """Assert that all workers meet and reduce correctly."""
        communicators = [worker.result(LIMIT_S) for worker in workers]
        assert sorted(each.rank for each in communicators) == list(range(len(self.addresses)))
        for length in (7, 200_001):  # with the exchange, and in separate lanes
            sums = self._all(communicators, lambda each, length=length: each.all_reduce(np.full(length, each.rank + 1)))
            assert all((total == sum(range(1, len(self.addresses) + 1))).all() for total in sums)

    def assert_end_well(self, workers: Sequence[Future[Communicator]]) -> None:
        """Assert that all workers meet, reduce correctly and close."""
        self.assert_reduce(workers)
        self._all([worker.result() for worker in workers], Communicator.close)

    def _all(self, communicators: Sequence[Communicator], act: Callable[[Communicator], Any]) -> list[Any]:
        return [future.result(LIMIT_S) for future in [self._threads.submit(act, each) for each in communicators]]


def connect(addresses: Sequence[str], rank: int) -> Communicator:
    """Connect a worker in this thread; it waits for the others for 0.2 s of a fake clock."""
    settings = Settings(limits=Limits(connect_timeout_s=0.2, clock=FakeClock(tick_s=0.01)))
    return collectives.connect("grpc", settings, addresses=addresses, rank=rank)
