"""The choice of a plan, and the division of arrays for it."""

from __future__ import annotations

import pytest

from collectives.plans.choice import Width, estimated_s, loads_of, quickest
from collectives.plans.cutting import Table, pieces_of, pieces_of_blocks
from collectives.plans.network import Network
from collectives.plans.planning import plan_for, possible_ways
from collectives.plans.spread import Spread

FLOAT32, BFLOAT16 = Width(4, 4), Width(2, 4)
GIGABIT = Network(100e-6, 5e-6, 125e6, 1e-6, 5e-6, 5e9, 10e9)
MEGABYTE = 1 << 18  # elements of float32


@pytest.mark.parametrize(
    ("hosts", "elements", "way"),
    [
        (2, 16, "doubling"),
        (8, 1 << 14, "direct"),
        (8, 100 * MEGABYTE, "direct"),
        (256, 16, "doubling"),
        (256, 1 << 20, "halving"),
    ],
)
def test_many_hosts_need_few_messages_and_few_hosts_need_few_rounds(hosts: int, elements: int, way: str) -> None:
    assert quickest(Spread.apart([1] * hosts), elements, FLOAT32, GIGABIT).name == way


def test_a_spread_without_pairs_has_one_way() -> None:
    assert quickest(Spread.apart([3, 3, 2]), 1 << 20, FLOAT32, GIGABIT).name == "direct"


def test_the_choice_may_be_restricted() -> None:
    spread = Spread.apart([1] * 256)
    assert quickest(spread, 16, FLOAT32, GIGABIT, ("direct", "halving")).name == "halving"


def test_an_estimate_counts_rounds_messages_and_bytes() -> None:
    spread = Spread.apart([1] * 4)
    bytes_s = 2 * 3 / 4 * 4 * MEGABYTE / GIGABIT.bytes_per_s
    added_s = 4 * MEGABYTE / GIGABIT.memory_bytes_per_s
    estimates = {way: estimated_s(plan_for(spread, way), MEGABYTE, FLOAT32, GIGABIT) for way in possible_ways(spread)}
    assert estimates == pytest.approx(
        {
            "direct": 2 * 100e-6 + 2 * 6 * 5e-6 + bytes_s + added_s,
            "halving": 4 * 100e-6 + 4 * 2 * 5e-6 + bytes_s + 1.5 * added_s,
            "doubling": 2 * 100e-6 + 2 * 2 * 5e-6 + 2 * 4 * MEGABYTE / GIGABIT.bytes_per_s + 4 * added_s,
        }
    )


def test_pieces_overlap_links_and_ranks_up_to_the_number_in_progress() -> None:
    plan = plan_for(Spread.apart([1] * 4), "direct")
    of_link, of_rank = Network(0, 0, 1e6, 0, 0, 1e9, 1e15), Network(0, 1.0, 1e15, 0, 0, 1e9, 1e15)
    link_s = 2 * 3 / 4 * 4 * MEGABYTE / 1e6
    assert estimated_s(plan, MEGABYTE, FLOAT32, of_link, 8) == pytest.approx(link_s)
    assert estimated_s(plan, MEGABYTE, FLOAT32, of_rank, 8) == pytest.approx(8 * 2 * 6)
    far = Network(1.0, 0, 1e15, 0, 0, 1e9, 1e15)
    assert [estimated_s(plan, MEGABYTE, FLOAT32, far, pieces) for pieces in (1, 4, 8)] == pytest.approx([2, 2, 4])


def test_ranks_add_while_links_carry_the_next_piece() -> None:
    plan = plan_for(Spread.apart([1] * 4), "direct")
    even = Network(0, 0, 1.5e6, 0, 0, 1e9, 1e6)  # a link is as busy as a rank that adds
    whole, cut = (estimated_s(plan, MEGABYTE, FLOAT32, even, pieces) for pieces in (1, 4))
    assert cut == pytest.approx(whole * (1 + 3 / 2) / 4)


def test_16_bit_floats_travel_in_16_bits_and_their_sums_in_32() -> None:
    alone = loads_of(plan_for(Spread.apart([1, 1]), "direct"), BFLOAT16)
    assert [load.link_bytes for load in alone] == [1, 1]
    several = loads_of(plan_for(Spread.apart([2, 2]), "direct"), BFLOAT16)
    assert [load.link_bytes for load in several] == [2, 1]


def test_ranks_of_a_host_share_its_link() -> None:
    loads = loads_of(plan_for(Spread((1, 1, 1, 1), (0, 0, 1, 1)), "direct"), FLOAT32)
    assert [(load.messages > 0, load.link_bytes) for load in loads] == [(False, 0), (True, 2), (True, 2), (False, 0)]
    assert [load.local_messages > 0 for load in loads] == [True, False, False, True]
    assert [load.local_bytes for load in loads] == [2, 0, 0, 2]


def test_the_load_of_a_link_is_that_of_its_busier_direction() -> None:
    """With three hosts, the last one sends to two, and then receives the answers of both."""
    loads = loads_of(plan_for(Spread.apart([1] * 3), "halving"), FLOAT32)
    assert [load.link_bytes for load in loads] == pytest.approx([8 / 3] * 4)


def test_bytes_inside_of_a_host_are_those_that_a_rank_sends() -> None:
    """Two ranks send their contributions to a third one, which sends the result to both."""
    loads = loads_of(plan_for(Spread((1, 1, 1, 1), (0, 0, 0, 1)), "direct", columns=1), FLOAT32)
    assert [load.local_bytes for load in loads] == [4, 0, 0, 8]


def test_sums_of_16_bit_floats_are_read_in_32() -> None:
    plan = plan_for(Spread.apart([1, 1]), "direct")
    of_memory = Network(0, 0, 1e30, 0, 0, 1e30, 1.0)
    (added,) = {load.added for load in loads_of(plan, BFLOAT16)} - {0}
    assert estimated_s(plan, 8, BFLOAT16, of_memory) == pytest.approx(8 * added * 4)


@pytest.mark.parametrize("size", [1, 7, 24, 25, 1000])
@pytest.mark.parametrize("longest", [1, 24, 2000])
def test_pieces_and_slices_cover_an_array_in_order(size: int, longest: int) -> None:
    plan = plan_for(Spread.apart([1] * 3), "halving")
    elements = [
        piece.offset + start + number
        for piece in pieces_of(plan, size, longest)
        for start, length in zip(piece.table.starts, piece.table.lengths, strict=True)
        for number in range(length)
    ]
    assert elements == list(range(size))


@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("longest", [1, 4, 100])
@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 1), (0, 1, 1), (0, 0, 0)])
def test_slices_of_blocks_lie_in_the_blocks_of_their_owners(hosts: tuple[int, ...], block: int, longest: int) -> None:
    plan = plan_for(Spread((1, 1, 1), hosts), "direct")
    found = []
    for piece in pieces_of_blocks(plan, block, longest):
        for owner, start, length in zip(plan.owners, piece.table.starts, piece.table.lengths, strict=True):
            elements = range(piece.offset + start, piece.offset + start + length)
            assert all(element // block == owner for element in elements)
            found += elements
    assert sorted(found) == list(range(3 * block))


def test_runs_join_adjacent_slices_and_skip_empty_ones() -> None:
    table = Table((0, 3, 3, 10, 12), (3, 0, 2, 2, 0))
    assert list(table.runs(0, 5)) == [(0, 3), (3, 5)]
    assert list(table.runs(1, 2)) == []
    assert table.elements(0, 3) == 5
