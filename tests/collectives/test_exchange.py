"""The promises of transports about the exchange before every collective."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from collectives import Limits, PeerLostError
from collectives.backends.thread import ThreadHub, ThreadLink
from collectives.instruments import Instruments
from collectives.point_to_point.link import EXCHANGE, Sizes
from collectives.point_to_point.transport import PointToPointTransport
from collectives.reduction import Reduction
from collectives.shared_memory.segment import channel_bytes
from collectives.shared_memory.transport import SharedMemoryTransport
from collectives.transport import Reducing, Transport
from collectives.waiting import Watch

LIMIT_S = 60.0
SIZE = 3


class Waiting:
    """An instrument that signals when its rank begins to wait for others."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    def waiting_for(self, instances: Sequence[int]) -> None:
        self.has_begun.set()


class Ranks:
    """Transports of some ranks in this process, and an instrument of waits for each."""

    def __init__(self, mechanism: str) -> None:
        self.waiting = [Waiting() for _ in range(SIZE)]
        names = [f"rank {rank}" for rank in range(SIZE)]
        watches = [
            Watch(rank, names, range(SIZE), Limits(), Instruments(self.waiting[rank]), spins=0) for rank in range(SIZE)
        ]
        if mechanism == "ring":
            hub = ThreadHub(SIZE)
            self.transports: list[Transport] = [
                PointToPointTransport(ThreadLink(hub, rank, 0), watches[rank]) for rank in range(SIZE)
            ]
        else:
            memory = memoryview(bytearray(channel_bytes(SIZE)))
            self.transports = [SharedMemoryTransport(memory, rank, SIZE, watches[rank], Path()) for rank in range(SIZE)]


def values(rank: int, turn: int) -> np.ndarray:
    return np.full(5, 100 * turn + rank, np.int64)


def texts(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


MECHANISMS = pytest.mark.parametrize("mechanism", ["ring", "window"])


@MECHANISMS
def test_all_ranks_receive_all_arrays_in_rank_order(mechanism: str) -> None:
    ranks = Ranks(mechanism)

    def exchange(rank: int) -> list[tuple[bool, tuple[int, ...], list[list[int]]]]:
        seen = []
        for turn in range(5):
            mine = [values(rank, turn) + number for number in range(rank + 1)]
            equal, parts = ranks.transports[rank].exchange(7, mine, rank + 1)
            seen.append((equal, parts.counts, texts(parts.arrays)))
        return seen

    expected = [
        (
            True,
            (1, 2, 3),
            [(values(rank, turn) + number).tolist() for rank in range(SIZE) for number in range(rank + 1)],
        )
        for turn in range(5)
    ]
    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(exchange, range(SIZE))) == [expected] * SIZE


@MECHANISMS
def test_received_arrays_stay_readable_while_others_are_in_the_next_exchange(mechanism: str) -> None:
    """Rank 0 still adds the arrays of one exchange when all others have begun the next one."""
    ranks = Ranks(mechanism)
    have_first = threading.Barrier(SIZE)

    def exchange(rank: int) -> list[list[int]]:
        transport = ranks.transports[rank]
        _, first = transport.exchange(7, [values(rank, 1)], 1)
        have_first.wait(LIMIT_S)
        if rank == 0:
            for other in ranks.waiting[1:]:
                other.has_begun.clear()
                assert other.has_begun.wait(LIMIT_S)
            during = texts(first.arrays)
        _, second = transport.exchange(7, [values(rank, 2)], 1)
        return during if rank == 0 else texts(second.arrays)

    with ThreadPoolExecutor(SIZE) as pool:
        during, *others = pool.map(exchange, range(SIZE))
    assert during == [values(rank, 1).tolist() for rank in range(SIZE)]
    assert others == [[values(rank, 2).tolist() for rank in range(SIZE)]] * (SIZE - 1)


def test_arrays_received_over_a_link_stay_readable_after_the_next_exchange() -> None:
    """The network may write the next messages into memory as soon as they are expected."""
    ranks = Ranks("ring")

    def exchange(rank: int) -> list[list[int]]:
        transport = ranks.transports[rank]
        _, first = transport.exchange(7, [values(rank, 1)], 1)
        transport.exchange(7, [values(rank, 2)], 1)
        return texts(first.arrays)

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(exchange, range(SIZE))) == [[values(rank, 1).tolist() for rank in range(SIZE)]] * SIZE


@MECHANISMS
def test_one_different_fingerprint_is_noticed_by_all_ranks(mechanism: str) -> None:
    ranks = Ranks(mechanism)

    def exchange(rank: int) -> list[bool]:
        return [ranks.transports[rank].exchange(7 + (rank == odd), [values(rank, 1)], 1)[0] for odd in range(SIZE + 1)]

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(exchange, range(SIZE))) == [[False] * SIZE + [True]] * SIZE


@MECHANISMS
def test_large_arrays_are_not_sent_with_the_exchange(mechanism: str) -> None:
    ranks = Ranks(mechanism)

    def exchange(rank: int) -> tuple[bool, tuple[int, ...], int]:
        large = [np.zeros(1 << 17, np.float64)] * 2
        equal, parts = ranks.transports[rank].exchange(7, large, 2)
        return equal, parts.counts, len(parts.arrays)

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(exchange, range(SIZE))) == [(True, (2, 2, 2), 0)] * SIZE


@pytest.mark.parametrize("nbytes", [0, 4096 - 4, 4096 + 4])
def test_sums_of_a_wrong_length_are_refused(nbytes: int) -> None:
    hub, opened = ThreadHub(2), (1 << 64) - 2
    link = ThreadLink(hub, 0, 0)
    link.sizes = Sizes(inline_bytes=512, gathered_bytes=1 << 14)
    watch = Watch(0, ["rank 0", "rank 1"], range(2), Limits(timeout_s=LIMIT_S), Instruments(), spins=0)
    transport = PointToPointTransport(link, watch)
    mine, out = np.ones(1024, np.float32), np.zeros(1024, np.float32)
    header = np.array([7, 1, opened, 0, 0, 0, 0, 0], np.uint64).view(np.uint8)
    ThreadLink(hub, 1, 0).send(np.concatenate([header, np.ones(nbytes, np.uint8)]), 0, EXCHANGE)
    transport.announce(Reducing([mine], out, Reduction("sum", mine.dtype)))
    with pytest.raises(PeerLostError, match=f"rank 1 is lost: it announced 1 arrays of .* {nbytes + 64}, .*faulty"):
        transport.exchange(7, [mine], 1)
    assert not out.any()
