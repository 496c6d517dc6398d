"""The number of bytes that each rank sends over links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest
from reference import contribution, contributions, dtype_of, reduced_contributions
from statements import assert_same_bits

from collectives import Communicator, Settings
from collectives.backends.grpc import sizes_for
from collectives.backends.thread import ThreadHub, ThreadLink, run_on_threads
from collectives.factory import RankGroup, assemble
from collectives.point_to_point.link import CHUNK_BYTES, Link, Sizes, Transfer


class CountingLink(Link):
    """A link that counts the messages and bytes sent to other hosts."""

    def __init__(self, link: Link, hosts: Sequence[int], sizes: Sizes) -> None:
        self.rank = link.rank
        self.size = link.size
        self.hosts = tuple(hosts)
        self.sizes = sizes
        self.sent_bytes = 0
        self.sent_messages = 0
        self._link = link

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        if self.hosts[to] != self.hosts[self.rank]:
            self.sent_bytes += data.nbytes
            self.sent_messages += 1
        return self._link.send(data, to, lane)

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        return self._link.receive(into, source, lane)


def sent_by_each_rank(
    hosts: int | Sequence[int],
    collective: Callable[[Communicator], object],
    sizes: Sizes = Link.sizes,
    counted: str = "sent_bytes",
) -> list[int]:
    """Return what each rank sends to other hosts in one collective: its bytes, or another count of `CountingLink`.

    Args:
        hosts: Host of each rank, or the number of hosts with one rank each.
        collective: Collective call.
        sizes: Sizes of messages.
        counted: Name of the count.
    """
    of_ranks = range(hosts) if isinstance(hosts, int) else hosts
    hub = ThreadHub(len(of_ranks))

    def no_subgroup(ranks) -> Communicator:
        raise NotImplementedError

    def program(outer: Communicator) -> int:
        links = [CountingLink(ThreadLink(hub, outer.rank, channel), of_ranks, sizes) for channel in (0, 1)]
        names = [f"rank {rank}" for rank in range(len(of_ranks))]
        group = RankGroup(outer.rank, names, range(len(of_ranks)))
        with assemble(Settings(spins=0), group, (links[0], links[1]), False, no_subgroup) as communicator:
            before: int = getattr(links[0], counted)
            collective(communicator)
            return getattr(links[0], counted) - before

    return run_on_threads(len(of_ranks), program)


@pytest.mark.parametrize(
    ("size", "replicas", "nbytes", "messages"),
    [
        (2, 1, 4 << 10, 1),
        (2, 1, 64 << 10, 1),
        (2, 2, 64 << 10, 1),
        (2, 3, 64 << 10, 1),
        (2, 4, 1 << 20, 1),
        (2, 1, (1 << 20) + 4, 2),
        (3, 2, 64 << 10, 2),
        (3, 1, 256 << 10, 2 + 2),
        (4, 4, 64 << 10, 3),
    ],
)
def test_workers_over_grpc_send_each_other_small_sums_in_one_message(
    size: int, replicas: int, nbytes: int, messages: int
) -> None:
    """Three replicas on each of two workers are two sums of each worker."""

    def reduce(communicator: Communicator) -> None:
        communicator.ordered_all_reduce([np.ones(nbytes // 4, np.float32)] * replicas)

    assert sent_by_each_rank(size, reduce, sizes_for(size), "sent_messages") == [messages] * size


def allowed(nbytes: int, times: float = 2) -> float:
    return times * nbytes + 1024 * -(-nbytes // CHUNK_BYTES)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("replicas", "sums"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize(("dtype", "length"), [("float32", 2**20 + 3), ("float64", 200_003), ("int8", 2**20)])
def test_each_rank_sends_its_sums_and_its_slice_of_the_result(
    size: int, replicas: int, sums: int, dtype: str, length: int
) -> None:
    """Aligned blocks of replicas have one sum; three replicas on each rank are two nodes of the tree."""

    def reduce(communicator: Communicator) -> None:
        first = communicator.rank * replicas
        arrays = [contribution(dtype, length, first + number) for number in range(replicas)]
        result = communicator.ordered_all_reduce(arrays)
        assert_same_bits(result, reduced_contributions(dtype, length, size * replicas, "sum").bits)

    sent = sent_by_each_rank(size, reduce)
    least = (sums + 1) * (size - 1) / size * length * np.dtype(dtype).itemsize
    assert max(sent) == pytest.approx(least, abs=1024 * size)


SMALL = Sizes(4096, 4096, 4096, 4096, 64)


@pytest.mark.parametrize(
    ("hosts", "of_one_host", "times"), [(2, 2, 1), (3, 2, 4 / 3), (2, 4, 1), (4, 1, 3 / 2), (2, 3, 3 / 2)]
)
@pytest.mark.parametrize("length", [30_011, 2**20 + 3])
def test_each_host_sends_no_more_than_a_single_rank(hosts: int, of_one_host: int, times: float, length: int) -> None:
    """The minimum is 2 (h - 1) / h of the array.

    Three replicas on a host are two nodes of the tree and cost 3 (h - 1) / h.
    """
    ranks = hosts * of_one_host

    def reduce(communicator: Communicator) -> None:
        result = communicator.ordered_all_reduce([contribution("float32", length, communicator.rank)])
        assert_same_bits(result, reduced_contributions("float32", length, ranks, "sum").bits)

    sent = sent_by_each_rank([rank // of_one_host for rank in range(ranks)], reduce, SMALL)
    of_hosts = [sum(sent[host * of_one_host : (host + 1) * of_one_host]) for host in range(hosts)]
    assert max(of_hosts) == pytest.approx(times * 4 * length, abs=1024 * ranks)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("length", [100_000, 2**20])
def test_two_ranks_with_one_replica_each_send_16_bit_floats_in_half_of_the_bytes(dtype: str, length: int) -> None:
    def tensor_bytes(dtype: str) -> list[int]:
        sent = sent_by_each_rank(2, lambda c: c.all_reduce(contribution(dtype, length, c.rank).copy()))
        return [nbytes - 64 for nbytes in sent]  # the exchange before every collective

    wide, narrow = tensor_bytes("float32"), tensor_bytes(dtype)
    assert wide == [4 * length] * 2
    assert narrow == [2 * length] * 2


BYTES_OF_SUMS = (  # the replicas of each rank, and the bytes of sums per element from the busiest rank
    ((1, 1), 2),
    ((2, 2), 4),
    ((5, 5), 2 + 4 + 4),
    ((1, 5), 2 + 4 + 4),
    ((1, 1, 1), 2),
    ((3, 1, 2), 4 + 2),
    ((2, 2, 2, 2), 4),
    ((8, 8, 8), 4),
    ((1, 4, 4, 4), 2 + 4 + 2),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("counts", "bytes_of_sums"), BYTES_OF_SUMS)
@pytest.mark.parametrize("length", [400_009, 2**20 + 1])
def test_16_bit_floats_travel_in_16_bits_and_their_sums_in_32(
    dtype: str, counts: tuple[int, ...], bytes_of_sums: int, length: int
) -> None:
    size, bounds = len(counts), [0, *accumulate(counts)]

    def reduce(communicator: Communicator) -> None:
        replicas = range(*bounds[communicator.rank : communicator.rank + 2])
        result = communicator.ordered_all_reduce(contributions(dtype, length, replicas), op="mean")
        assert_same_bits(result, reduced_contributions(dtype, length, bounds[-1], "mean").bits)

    sent = sent_by_each_rank(size, reduce)
    assert max(sent) == pytest.approx((bytes_of_sums + 2) * (size - 1) / size * length, abs=1024 * size)


@pytest.mark.parametrize(
    ("size", "replicas", "dtype", "times"),
    [
        (2, 1, "float32", 1 / 2),
        (2, 2, "float32", 1 / 2),
        (2, 3, "float32", 1),
        (4, 1, "float32", 3 / 4),
        (4, 2, "float32", 3 / 4),
        (4, 2, "bfloat16", 3 / 2),
        (4, 5, "bfloat16", 15 / 4),
    ],
)
def test_a_reduce_scatter_sends_the_bytes_of_an_all_reduce_without_the_results(
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
def test_a_gather_sends_every_block_only_to_the_root(size: int) -> None:
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
