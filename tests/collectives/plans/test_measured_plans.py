"""Plans by measured costs: ways, columns and pieces, with defaults for unmeasured networks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

import numpy as np
import pytest

from collectives.backends.grpc import SIZES as OF_GRPC
from collectives.backends.thread import ThreadHub, ThreadLink
from collectives.network.wire import MESSAGE_BYTES
from collectives.plans.choice import Width
from collectives.plans.network import Network
from collectives.point_to_point.link import Sizes
from collectives.point_to_point.planned import Planned, Planner
from collectives.reduction import Reduction
from collectives.simulation import of_plan, simulate

FLOAT32 = Reduction("sum", np.dtype(np.float32))
LOOPBACK = Network(20e-6, 10e-6, 2e9, 5e-6, 2e-6, 8e9, 10e9)
SHAPED = Network(1e-3, 30e-6, 25e6, 5e-6, 2e-6, 4e9, 10e9)
FAR = Network(10e-3, 1e-6, 25e6)
DEAR_MESSAGES = Network(1e-6, 1e-3, 1e9, 1e-6, 1e-6, 8e9, 10e9)
DEAR_NEIGHBOURS = Network(1e-6, 1e-6, 1e9, 1e-6, 1e-3, 8e9, 10e9)
DEAR_SUMS = Network(1e-6, 1e-9, 1e9, 1e-9, 1e-9, 8e9, 1e6)
FEW_BYTES_AND_MESSAGES = Network(1e-9, 1.0, 1e3, 1e-9, 1.0, 1e3, 1e12)
LIKE_MPI = Sizes(1 << 14, 1 << 18, 60 << 10, 60 << 10, one_column_bytes=1 << 21)
KIBIBYTE = 1 << 8  # in elements
FOUR, PAIRS = (0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3)


def planned(
    counts: Sequence[int],
    hosts: Sequence[int],
    elements: int,
    costs: Network | None,
    sizes: Sizes = LIKE_MPI,
    pairs: Collection[tuple[int, int]] = (),
    rank: int = 0,
) -> Planned:
    """Return the plan of a rank for measured costs, or for the defaults if `costs` is None."""
    link = ThreadLink(ThreadHub(len(hosts)), rank, 0)
    link.sizes, link.hosts = sizes, tuple(hosts)
    link.nearby = link.hosts if len(set(hosts)) < len(hosts) else ()
    if costs is not None:
        link.costs, link.are_costs_measured = costs, True
    return Planner(link, pairs).planned(FLOAT32, tuple(counts), elements, False)


def test_costly_messages_make_one_rank_of_each_host_send_for_all() -> None:
    slices = {
        name: planned((1,) * 8, PAIRS, 64 * KIBIBYTE, costs).plan.slices
        for name, costs in {"usual": None, "messages": DEAR_NEIGHBOURS, "sums": DEAR_SUMS}.items()
    }
    assert slices == {"usual": 4, "messages": 4, "sums": 8}


def test_a_long_array_always_uses_all_columns() -> None:
    assert planned((1,) * 8, PAIRS, 4096 * KIBIBYTE, DEAR_NEIGHBOURS).plan.slices == 8


def test_an_array_is_cut_into_pieces_if_they_keep_a_link_busy() -> None:
    pieces = {
        name: len(planned((3, 3, 2), (0, 1, 2), 64 * KIBIBYTE, costs).programs)
        for name, costs in {"usual": None, "messages": DEAR_MESSAGES, "a slow link": SHAPED}.items()
    }
    assert pieces == {"usual": 1, "messages": 1, "a slow link": 4}


def test_a_first_round_sent_with_the_comparison_of_calls_is_not_cut() -> None:
    """The combined message saves a latency, which is more here than pieces would save."""
    pairs = {(source, to) for source in FOUR for to in FOUR if source != to}
    alone = planned((1,) * 4, FOUR, 48 * KIBIBYTE, FAR)
    compared = planned((1,) * 4, FOUR, 48 * KIBIBYTE, FAR, pairs=pairs)
    assert (len(alone.programs), alone.opens_in) == (4, -1)
    assert (len(compared.programs), compared.opens_in) == (1, 0)


@pytest.mark.parametrize("costs", [LOOPBACK, SHAPED, DEAR_NEIGHBOURS, DEAR_SUMS])
def test_all_ranks_choose_the_same_plan(costs: Network) -> None:
    of_ranks = [planned((1, 2, 2, 1), (0, 0, 1, 1), 200 * KIBIBYTE, costs, rank=rank) for rank in range(4)]
    assert len({(each.plan, tuple(offset for offset, _ in each.programs)) for each in of_ranks}) == 1


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("mebibytes", [1, 4, 5, 64])
def test_no_message_exceeds_the_limit_of_grpc(workers: int, mebibytes: int) -> None:
    """Recursive halving has messages of many slices."""
    found = planned((1,) * workers, range(workers), mebibytes << 18, FEW_BYTES_AND_MESSAGES, OF_GRPC)
    assert found.plan.name == "halving"
    parcels = [
        parcel for _, program in found.programs for turn in program.turns for parcel in (*turn.parts, *turn.results)
    ]
    assert max(parcel.elements for parcel in parcels) * 4 <= MESSAGE_BYTES


SPREADS = [
    ((1,) * 4, FOUR),
    ((1,) * 8, PAIRS),
    ((1,) * 8, (0,) * 4 + (1,) * 4),
    ((3, 3, 2), (0, 1, 2)),
    ((1, 2, 2, 1), FOUR),
]


def test_measured_plans_are_fast_on_the_simulated_network() -> None:
    """A measured plan is at most 5 % slower than the default, and often much faster."""
    ratios = []
    for costs in (LOOPBACK, SHAPED, Network()):
        for counts, hosts in SPREADS:
            for elements in (64 * KIBIBYTE, 128 * KIBIBYTE, 256 * KIBIBYTE, 1024 * KIBIBYTE):
                usual, measured = (
                    simulate(of_plan(each.plan, elements, Width(4, 4), len(each.programs)), costs).seconds
                    for each in (planned(counts, hosts, elements, by) for by in (None, costs))
                )
                ratios.append(measured / usual)
                assert measured <= 1.05 * usual, (costs, counts, hosts, elements)
    assert median(ratios) <= 0.9
    assert min(ratios) <= 0.35
