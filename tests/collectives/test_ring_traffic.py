"""How many bytes each rank sends in the ring."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reference import contribution, dtype_of, reduced_contributions
from statements import assert_same_bits

from collectives import Communicator, Settings
from collectives.assembly import Group, assemble
from collectives.backends.thread import ThreadHub, ThreadLink, run_on_threads
from collectives.link import Link, Transfer
from collectives.ring import CHUNK_BYTES


class CountingLink(Link):
    """Counts what goes through another link."""

    def __init__(self, link: Link) -> None:
        self.rank = link.rank
        self.size = link.size
        self.sent_bytes = 0
        self._link = link

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        self.sent_bytes += data.nbytes
        return self._link.send(data, to, lane)

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        return self._link.receive(into, source, lane)


def sent_by_each_rank(size: int, collective: Callable[[Communicator], object]) -> list[int]:
    """The bytes that each rank sends in one collective."""
    hub = ThreadHub(size)

    def no_subgroup(ranks) -> Communicator:
        raise NotImplementedError

    def program(outer: Communicator) -> int:
        links = [CountingLink(ThreadLink(hub, outer.rank, channel)) for channel in (0, 1)]
        names = [f"rank {rank}" for rank in range(size)]
        group = Group(outer.rank, names, range(size))
        with assemble(Settings(spins=0), group, (links[0], links[1]), False, no_subgroup) as communicator:
            before = links[0].sent_bytes
            collective(communicator)
            return links[0].sent_bytes - before

    return run_on_threads(size, program)


def allowed(nbytes: int, times: float = 2) -> float:
    return times * nbytes + 1024 * -(-nbytes // CHUNK_BYTES)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("dtype", "length"), [("float32", 2**20 + 3), ("float64", 200_003), ("int8", 2**20)])
def test_each_rank_sends_every_byte_at_most_twice(size: int, replicas: int, dtype: str, length: int) -> None:
    def reduce(communicator: Communicator) -> None:
        first = communicator.rank * replicas
        arrays = [contribution(dtype, length, first + number) for number in range(replicas)]
        result = communicator.ordered_all_reduce(arrays)
        assert_same_bits(result, reduced_contributions(dtype, length, size * replicas, "sum"))

    sent = sent_by_each_rank(size, reduce)
    assert max(sent) <= allowed(length * np.dtype(dtype).itemsize)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partial_sums_of_16_bit_floats_travel_in_32_bits(size: int, dtype: str) -> None:
    """So each of their bytes is sent three times: twice as a partial sum, once as a result."""
    length = 2**20 + 3
    sent = sent_by_each_rank(size, lambda c: c.all_reduce(contribution(dtype, length, c.rank).copy()))
    assert max(sent) <= allowed(length * dtype_of(dtype).itemsize, 3)


@pytest.mark.parametrize("size", [2, 4])
def test_a_broadcast_sends_every_byte_once(size: int) -> None:
    sent = sent_by_each_rank(size, lambda c: c.broadcast(np.zeros(2**20, np.float32), 1))
    assert max(sent) <= allowed(4 * 2**20, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_a_gather_sends_every_block_once_to_the_next_rank(size: int) -> None:
    block = 2**20
    sent = sent_by_each_rank(size, lambda c: c.all_gather(np.zeros(block, np.uint8)))
    assert max(sent) <= (size - 1) * allowed(block, 1)


def test_a_small_reduction_is_one_message_to_every_other_rank() -> None:
    sent = sent_by_each_rank(4, lambda c: c.all_reduce(np.zeros(100, np.float32)))
    assert max(sent) <= 3 * (400 + 1024)


def test_a_mismatch_of_large_tensors_moves_no_tensor() -> None:
    def disagree(communicator: Communicator) -> None:
        with pytest.raises(Exception, match="Tensor layouts did not match"):
            communicator.all_reduce(np.zeros(2**20 + communicator.rank))

    assert max(sent_by_each_rank(3, disagree)) < 16_384
