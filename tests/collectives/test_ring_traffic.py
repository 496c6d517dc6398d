"""How many bytes each rank sends in the ring."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
from reference import contribution, contributions, dtype_of, reduced_contributions
from statements import assert_same_bits

from collectives import Communicator, Settings
from collectives.assembly import Group, assemble
from collectives.backends.thread import ThreadHub, ThreadLink, run_on_threads
from collectives.ring.link import CHUNK_BYTES, Link, Sizes, Transfer


class CountingLink(Link):
    """Counts what goes through another link.

    Args:
        link: that one.
        of_one_host: how many ranks, next to each other, share a host; between them nothing is counted.
    """

    def __init__(self, link: Link, of_one_host: int = 1) -> None:
        self.rank = link.rank
        self.size = link.size
        self.sizes = link.sizes
        self.sent_bytes = 0
        self._of_one_host = of_one_host
        self._link = link

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        if to // self._of_one_host != self.rank // self._of_one_host:
            self.sent_bytes += data.nbytes
        return self._link.send(data, to, lane)

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        return self._link.receive(into, source, lane)


def sent_by_each_rank(size: int, collective: Callable[[Communicator], object], sizes: Sizes | None = None) -> list[int]:
    """The bytes that each rank sends in one collective; with `sizes`, to other hosts."""
    hub = ThreadHub(size)

    def no_subgroup(ranks) -> Communicator:
        raise NotImplementedError

    def program(outer: Communicator) -> int:
        of_one_host = 1 if sizes is None else sizes.sharing
        links = [CountingLink(ThreadLink(hub, outer.rank, channel), of_one_host) for channel in (0, 1)]
        for link in links:
            link.sizes = sizes or link.sizes
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
        assert_same_bits(result, reduced_contributions(dtype, length, size * replicas, "sum").bits)

    sent = sent_by_each_rank(size, reduce)
    assert max(sent) <= allowed(length * np.dtype(dtype).itemsize)


@pytest.mark.parametrize(("hosts", "of_one_host"), [(2, 2), (3, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize("length", [30_011, 2**20 + 3])
def test_each_host_sends_every_byte_at_most_twice(hosts: int, of_one_host: int, length: int) -> None:
    ranks = hosts * of_one_host
    sizes = Sizes(4096, 4096, sharing=of_one_host, smallest_chunk_bytes=4096, chunks_at_least=64)

    def reduce(communicator: Communicator) -> None:
        result = communicator.ordered_all_reduce([contribution("float32", length, communicator.rank)])
        assert_same_bits(result, reduced_contributions("float32", length, ranks, "sum").bits)

    sent = sent_by_each_rank(ranks, reduce, sizes)
    of_hosts = [sum(sent[host * of_one_host : (host + 1) * of_one_host]) for host in range(hosts)]
    assert max(of_hosts) <= 2 * 4 * length + 1024 * ranks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("length", [100_000, 2**20])
def test_two_ranks_with_one_replica_each_send_16_bit_floats_in_half_of_the_bytes(dtype: str, length: int) -> None:
    def tensor_bytes(dtype: str) -> list[int]:
        sent = sent_by_each_rank(2, lambda c: c.all_reduce(contribution(dtype, length, c.rank).copy()))
        return [nbytes - 64 for nbytes in sent]  # what precedes every collective

    wide, narrow = tensor_bytes("float32"), tensor_bytes(dtype)
    assert wide == [4 * length] * 2
    assert narrow == [2 * length] * 2


SLICES, RING = "slices", "ring"
WAYS_OF_16_BITS = (  # replicas of each rank, and how they are reduced
    ((1, 1), SLICES),
    ((2, 2), SLICES),
    ((5, 5), RING),
    ((1, 5), RING),
    ((1, 1, 1), SLICES),
    ((3, 1, 2), SLICES),
    ((2, 2, 2, 2), SLICES),
    ((1, 4, 4, 4), RING),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("counts", "way"), WAYS_OF_16_BITS)
@pytest.mark.parametrize("length", [400_009, 2**20 + 1])
def test_16_bit_floats_go_the_way_that_takes_fewer_bytes(
    dtype: str, counts: tuple[int, ...], way: str, length: int
) -> None:
    """With L replicas on each of n ranks slices take 2 (L + 1) (n - 1) / n bytes of an element, partial sums 4 + 2."""
    size, bounds = len(counts), [0, *accumulate(counts)]

    def reduce(communicator: Communicator) -> None:
        replicas = range(*bounds[communicator.rank : communicator.rank + 2])
        result = communicator.ordered_all_reduce(contributions(dtype, length, replicas), op="mean")
        assert_same_bits(result, reduced_contributions(dtype, length, bounds[-1], "mean").bits)

    in_slices = 2 * (max(counts) + 1) * (size - 1) / size
    in_ring = 6 if size > 2 else 4
    assert way == (SLICES if in_slices <= in_ring else RING)
    sent = sent_by_each_rank(size, reduce)
    assert max(sent) <= min(in_slices, in_ring) * length + 1024 * size


@pytest.mark.parametrize(("hosts", "of_one_host", "times"), [(2, 2, 4), (3, 2, 16 / 3), (4, 2, 6), (4, 1, 3)])
def test_each_host_sends_16_bit_floats_the_way_that_takes_fewer_bytes(
    hosts: int, of_one_host: int, times: float
) -> None:
    ranks, length = hosts * of_one_host, 300_007
    sizes = Sizes(4096, 4096, sharing=of_one_host, smallest_chunk_bytes=4096, chunks_at_least=64)

    def reduce(communicator: Communicator) -> None:
        result = communicator.ordered_all_reduce([contribution("bfloat16", length, communicator.rank)])
        assert_same_bits(result, reduced_contributions("bfloat16", length, ranks, "sum").bits)

    sent = sent_by_each_rank(ranks, reduce, sizes)
    of_hosts = [sum(sent[host * of_one_host : (host + 1) * of_one_host]) for host in range(hosts)]
    assert max(of_hosts) <= times * length + 1024 * ranks


@pytest.mark.parametrize(
    ("size", "replicas", "dtype", "times"),
    [
        (2, 1, "float32", 1 / 2),
        (2, 3, "float32", 1),
        (4, 1, "float32", 3 / 4),
        (4, 2, "float32", 1),
        (4, 2, "bfloat16", 3 / 2),
        (4, 5, "bfloat16", 2),
    ],
)
def test_a_reduce_scatter_sends_slices_or_partial_sums_and_each_block_to_its_owner(
    size: int, replicas: int, dtype: str, times: float
) -> None:
    length = 3 * 2**18

    def scatter(communicator: Communicator) -> None:
        first = communicator.rank * replicas
        communicator.ordered_reduce_scatter(contributions(dtype, length, range(first, first + replicas)))

    sent = sent_by_each_rank(size, scatter)
    assert max(sent) == pytest.approx(times * length * dtype_of(dtype).itemsize, abs=1024 * size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_broadcast_sends_every_byte_once(size: int) -> None:
    sent = sent_by_each_rank(size, lambda c: c.broadcast(np.zeros(2**20, np.float32), 1))
    assert max(sent) <= allowed(4 * 2**20, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_an_all_gather_sends_every_block_once_to_the_next_rank(size: int) -> None:
    block = 2**20
    sent = sent_by_each_rank(size, lambda c: c.all_gather(np.zeros(block, np.uint8)))
    assert max(sent) <= (size - 1) * allowed(block, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_a_gather_on_one_rank_sends_every_block_there_and_nowhere_else(size: int) -> None:
    block = 2**20
    sent = sent_by_each_rank(size, lambda c: c.gather(np.zeros(block, np.uint8), 1))
    assert max(sent) <= allowed(block, 1)
    assert sent[1] <= 1024 * size


def test_a_small_reduction_is_one_message_to_every_other_rank() -> None:
    sent = sent_by_each_rank(4, lambda c: c.all_reduce(np.zeros(100, np.float32)))
    assert max(sent) <= 3 * (400 + 1024)


def test_a_mismatch_of_large_tensors_moves_no_tensor() -> None:
    def disagree(communicator: Communicator) -> None:
        with pytest.raises(Exception, match="Tensor layouts did not match"):
            communicator.all_reduce(np.zeros(2**20 + communicator.rank))

    assert max(sent_by_each_rank(3, disagree)) < 16_384
