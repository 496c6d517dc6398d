"""The backend for a single process: one rank, without waiting and without further libraries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from collectives.arrays import aligned_empty
from collectives.communicator import Communicator
from collectives.factory import RankGroup, Settings
from collectives.named import NamedQueue
from collectives.transport import Parts, Reducing, Transport


class SingleTransport(Transport):
    """The transport of one rank; every exchange agrees."""

    rank = 0
    size = 1

    @override
    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        return True, Parts((count,), arrays)

    @override
    def reduce(self, reducing: Reducing, parts: Parts) -> None:
        reducing.reduction.reduce(reducing.contributions, reducing.out, len(reducing.contributions))

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Do nothing: there is no other rank."""

    @override
    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out[0], block)

    @override
    def gather(self, block: np.ndarray, out: np.ndarray | None, root: int) -> None:
        assert out is not None
        np.copyto(out[0], block)

    @override
    def allocate(self, nbytes: int) -> np.ndarray:
        return aligned_empty(nbytes)

    def close(self) -> None:
        """Do nothing: the transport holds no resources."""


def connect(settings: Settings, instances: Sequence[int] = (0,)) -> Communicator:
    """Return a communicator of this process alone."""
    group = RankGroup(0, ["rank 0"], instances)
    queue = NamedQueue(SingleTransport(), group.watch(settings))
    return Communicator(
        SingleTransport(),
        group.watch(settings),
        queue,
        settings.progress,
        lambda ranks: connect(settings, instances),
        "single",
    )
