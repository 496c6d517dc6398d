"""Every way to reduce over links, in one piece and in many, on any hosts: the bits are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from reference import contributions, reduced
from statements import assert_same_bits

from collectives import Communicator, LayoutMismatchError, PeerRefusedError, Settings
from collectives.backends.thread import ThreadHub, ThreadLink, run_on_threads
from collectives.factory import RankGroup, assemble, refuse_other_networks
from collectives.plans.choice import Width, quickest
from collectives.plans.network import Network
from collectives.plans.spread import Spread
from collectives.point_to_point.link import Sizes
from collectives.point_to_point.planned import Planner
from collectives.reduction import Reduction

FEW_ROUNDS = Network(1.0, 1e-9, 1e6, 1.0, 1e-9, 1e6, 1e12)
FEW_MESSAGES = Network(1.0, 1.0, 1e12, 1.0, 1.0, 1e12, 1e12)
FEW_BYTES_AND_MESSAGES = Network(1e-9, 1.0, 1e3, 1e-9, 1.0, 1e3, 1e12)
WAYS = {"direct": FEW_ROUNDS, "halving": FEW_BYTES_AND_MESSAGES, "doubling": FEW_MESSAGES}
WHOLE = Sizes(inline_bytes=0, chunk_bytes=1 << 20)
IN_PIECES = Sizes(0, 0, 512, 512, 2)
GATHERED = Sizes(inline_bytes=512, gathered_bytes=60 << 10)
LENGTH = 5040


def on_links(
    hosts: Sequence[int], costs: Network, sizes: Sizes, program, share_memory: bool = False, are_measured: bool = False
):
    hub = ThreadHub(len(hosts))

    def no_subgroup(ranks) -> Communicator:
        raise NotImplementedError

    def run(outer: Communicator):
        links = [ThreadLink(hub, outer.rank, channel) for channel in (0, 1)]
        for link in links:
            link.hosts, link.costs, link.sizes = tuple(hosts), costs, sizes
        settings = Settings(spins=0, network=costs if are_measured else None)
        group = RankGroup(outer.rank, [f"rank {rank}" for rank in range(len(hosts))], range(len(hosts)))
        with assemble(settings, group, (links[0], links[1]), share_memory, no_subgroup) as communicator:
            return program(communicator)

    return run_on_threads(len(hosts), run)


def assert_reduces(
    counts: Sequence[int],
    hosts: Sequence[int],
    costs: Network,
    sizes: Sizes,
    dtype: str,
    share_memory: bool = False,
    are_measured: bool = False,
) -> None:
    bounds = [0, *accumulate(counts)]
    everything = contributions(dtype, LENGTH, range(bounds[-1]))
    expected = reduced(everything, "mean")

    def program(communicator: Communicator) -> None:
        rank = communicator.rank
        mine = everything[bounds[rank] : bounds[rank + 1]]
        assert_same_bits(communicator.ordered_all_reduce(mine, op="mean"), expected)
        block = LENGTH // communicator.size
        own = communicator.ordered_reduce_scatter([array[: block * communicator.size] for array in mine], op="mean")
        assert_same_bits(own, expected[rank * block : (rank + 1) * block])
        copies = [array.copy() for array in mine]
        assert_same_bits(communicator.ordered_all_reduce(copies, copies[-1], "mean"), expected)

    on_links(hosts, costs, sizes, program, share_memory, are_measured)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(("local", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_every_way_has_the_bits_of_the_tree(way: str, ranks: int, local: int, dtype: str) -> None:
    width = Width(4, 4) if dtype == "float32" else Width(2, 4)
    chosen = quickest(Spread.apart([local] * ranks), LENGTH, width, WAYS[way]).name
    assert chosen == way or ranks < 8  # with few ranks, halving saves no messages
    assert_reduces([local] * ranks, range(ranks), WAYS[way], WHOLE, dtype)


@pytest.mark.parametrize("sizes", [WHOLE, IN_PIECES])
@pytest.mark.parametrize(
    ("counts", "hosts"),
    [
        ((1, 1, 1, 1), (0, 0, 1, 1)),
        ((2, 2, 2, 2), (0, 0, 1, 1)),
        ((1, 1, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1)),
        ((3, 3, 2), (0, 1, 2)),
        ((1, 2, 1), (0, 0, 1)),
        ((1, 1, 1, 1, 1), (0, 1, 1, 1, 1)),
        ((2, 1, 1, 2), (0, 1, 0, 1)),
        ((1, 2, 3), (0, 0, 0)),
        ((5,), (0,)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_spread_over_hosts_has_the_bits_of_the_tree(
    counts: tuple[int, ...], hosts: tuple[int, ...], sizes: Sizes, dtype: str
) -> None:
    assert_reduces(counts, hosts, FEW_MESSAGES, sizes, dtype)


@pytest.mark.parametrize("sizes", [WHOLE, IN_PIECES])
@pytest.mark.parametrize(
    ("counts", "hosts"),
    [
        ((2, 2, 2, 2), (0, 0, 1, 1)),
        ((3, 3, 2), (0, 0, 1)),
        ((1, 1, 1, 1, 1), (0, 1, 1, 1, 2)),
        ((2, 1, 1, 2), (0, 1, 0, 1)),
        ((1, 1, 1, 1, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)),
    ],
)
@pytest.mark.parametrize(("dtype", "one_column_bytes"), [("float32", 0), ("float16", 0), ("float32", 1 << 18)])
def test_ranks_of_a_host_that_share_memory_have_the_same_bits(
    counts: tuple[int, ...], hosts: tuple[int, ...], sizes: Sizes, dtype: str, one_column_bytes: int
) -> None:
    sizes = replace(sizes, inline_bytes=512, one_column_bytes=one_column_bytes)
    assert_reduces(counts, hosts, FEW_MESSAGES, sizes, dtype, share_memory=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
@pytest.mark.parametrize(
    "counts", [(1, 1), (2, 2), (3, 3), (2, 1), (3, 3, 3), (1, 2, 3), (1, 1, 1, 1, 1), (6, 6, 6), (2,) * 9]
)
def test_sums_that_travel_with_the_agreement_have_the_bits_of_the_tree(counts: tuple[int, ...], dtype: str) -> None:
    """Ranks assume equal numbers of contributions; a wrong assumption costs a further round."""
    assert_reduces(counts, range(len(counts)), FEW_MESSAGES, GATHERED, dtype)


def test_sums_that_travel_with_different_calls_are_dropped() -> None:
    everything = contributions("float32", LENGTH, range(4))
    expected = reduced(everything, "sum")

    def program(communicator: Communicator) -> None:
        mine = [array.copy() for array in everything[2 * communicator.rank : 2 * communicator.rank + 2]]
        with pytest.raises(LayoutMismatchError, match="rank 0 called.*'of 0'.*rank 1 called.*'of 1'"):
            communicator.ordered_all_reduce(mine, mine[0], name=f"of {communicator.rank}")
        for array, sent in zip(mine, everything[2 * communicator.rank :], strict=False):
            assert_same_bits(array, sent)
        assert_same_bits(communicator.ordered_all_reduce(mine, mine[0]), expected)

    on_links((0, 1), FEW_MESSAGES, GATHERED, program)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_arrays_shorter_than_their_slices_are_reduced(length: int) -> None:
    everything = contributions("float32", length, range(4))
    expected = reduced(everything, "sum")

    def program(communicator: Communicator) -> np.ndarray:
        return communicator.ordered_all_reduce([everything[communicator.rank]])

    for costs in WAYS.values():
        for result in on_links((0, 0, 1, 1), costs, WHOLE, program):
            assert_same_bits(result, expected)


# ---- measured costs


LOOPBACK = Network(20e-6, 10e-6, 2e9, 5e-6, 2e-6, 8e9, 10e9)
SHAPED = Network(1e-3, 30e-6, 25e6, 5e-6, 2e-6, 4e9, 10e9)
MEASURED = {"loopback": LOOPBACK, "a shaped link": SHAPED, **WAYS}


@pytest.mark.parametrize("sizes", [WHOLE, IN_PIECES], ids=["whole", "in pieces"])
@pytest.mark.parametrize("costs", MEASURED.values(), ids=MEASURED)
@pytest.mark.parametrize(
    ("counts", "hosts"),
    [
        ((1,) * 8, (0, 0, 1, 1, 2, 2, 3, 3)),
        ((3, 3, 2), (0, 1, 2)),
        ((1, 2, 1, 2), (0, 0, 1, 1)),
        ((1, 2, 2, 1), (0, 1, 2, 3)),
    ],
)
def test_measured_costs_do_not_change_the_bits(
    counts: tuple[int, ...], hosts: tuple[int, ...], costs: Network, sizes: Sizes
) -> None:
    sizes = replace(sizes, inline_bytes=512)
    assert_reduces(counts, hosts, costs, sizes, "float32", share_memory=True, are_measured=True)


def test_long_arrays_use_direct_exchange_unless_measured_costs_favour_another_way() -> None:
    def way(costs: Network, are_measured: bool) -> str:
        link = ThreadLink(ThreadHub(8), 0, 0)
        link.sizes = replace(IN_PIECES, whole_bytes=1 << 14)
        link.costs, link.are_costs_measured = costs, are_measured
        planned = Planner(link, ()).planned(Reduction("sum", np.dtype(np.float32)), (1,) * 8, LENGTH, False)
        assert len(planned.programs) > 1
        return planned.plan.name

    assert [way(FEW_BYTES_AND_MESSAGES, are_measured) for are_measured in (False, True)] == ["direct", "halving"]
    assert [way(FEW_ROUNDS, are_measured) for are_measured in (False, True)] == ["direct", "direct"]


def test_ranks_with_different_costs_are_refused() -> None:
    refuse_other_networks([None, None])
    refuse_other_networks([SHAPED, replace(SHAPED)])
    with pytest.raises(
        PeerRefusedError, match="rank 0 chooses plans by the usual costs, rank 2 by Network.latency_s=2e"
    ):
        refuse_other_networks([None, None, LOOPBACK])
    with pytest.raises(PeerRefusedError, match="rank 1 by Network.latency_s=0.001.*give all ranks the same costs"):
        refuse_other_networks([LOOPBACK, SHAPED])
