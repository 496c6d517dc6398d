"""Plans of reductions, evaluated with expressions in place of numbers, without processes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from plan_evaluation import assert_right, compositions, drawn_spread, fewest_sums, host_spreads, outcome
from tiers import first_of

from collectives.plans.plan import Message, Plan, Round
from collectives.plans.planning import plan_for, possible_ways
from collectives.plans.spread import Spread
from collectives.tree import TreeNode


def check(spread: Spread) -> None:
    """Check all ways, in the largest number of columns and in one."""
    for way in possible_ways(spread):
        for columns in (0, 1):
            plan = plan_for.__wrapped__(spread, way, columns)
            try:
                assert_right(plan)
            except Exception as error:
                raise AssertionError(f"{way} of {spread} in columns {columns}: {error!r}") from error


@pytest.mark.parametrize("replicas", first_of(range(1, 9), 6))
def test_all_contiguous_spreads_of_few_replicas_add_in_the_order_of_the_tree(
    replicas: int,
) -> None:
    for ranks in range(1, min(replicas, 5) + 1):
        for counts in compositions(replicas, ranks):
            for hosts in host_spreads(ranks, 4):
                check(Spread(counts, hosts))


@pytest.mark.parametrize("block", first_of(range(4), 2))
def test_random_spreads_of_up_to_64_replicas_add_in_the_order_of_the_tree(seed: int, block: int) -> None:
    drawn = random.Random(f"{seed}/{block}")
    for replicas in range(1 + 16 * block, 17 + 16 * block):
        for _ in range(12):
            check(drawn_spread(drawn, replicas, 16, 4))


@pytest.mark.parametrize("hosts", range(2, 17))
@pytest.mark.parametrize("local", [1, 2, 4])
def test_hosts_with_equal_powers_of_two_of_replicas_may_add_in_every_way(hosts: int, local: int) -> None:
    spread = Spread.apart([local] * hosts)
    assert possible_ways(spread) == ("direct", "halving", "doubling")
    check(spread)
    check(Spread((local,) * 2 * hosts, tuple(host for host in range(hosts) for _ in range(2))))


def sent_by(plan: Plan) -> list[int]:
    """Return the number of slices that each rank sends."""
    sent = [0] * plan.spread.size
    for source, _, first, stop, _ in plan.messages():
        sent[source] += stop - first
    return sent


@pytest.mark.parametrize("hosts", range(2, 17))
@pytest.mark.parametrize("way", ["direct", "halving"])
def test_every_rank_sends_the_minimum(hosts: int, way: str) -> None:
    """Each half moves (n - 1) / n of the array. With halving, ranks without a partner send more of the results."""
    plan = plan_for(Spread.apart([2] * hosts), way)
    assert plan.slices == hosts
    assert sent_by(plan.scattering) == [hosts - 1] * hosts
    if way == "direct" or hosts & (hosts - 1) == 0:
        assert sent_by(plan) == [2 * (hosts - 1)] * hosts
    else:
        assert max(sent_by(plan)) <= 1.25 * 2 * (hosts - 1)


def sums_of(plan: Plan) -> Counter[int]:
    """Return the number of messages with sums for each owner's slice."""
    sums: Counter[int] = Counter()
    for _, _, first, stop, node in plan.messages():
        if node != TreeNode(0, plan.spread.replicas):
            sums.update(plan.owners[first:stop])
    return sums


@pytest.mark.parametrize("replicas", range(2, 9))
def test_no_plan_sends_fewer_sums_than_the_tree_requires(replicas: int) -> None:
    """A plan sends exactly that number if each rank owns one node."""
    for ranks in range(2, replicas + 1):
        for counts in compositions(replicas, ranks):
            spread = Spread.apart(counts)
            for way in possible_ways(spread):
                plan = plan_for(spread, way)
                fewest = {owner: fewest_sums(spread, owner) for owner in plan.owners if owner >= 0}
                sums = sums_of(plan)
                assert all(sums[owner] >= number for owner, number in fewest.items())
                if all(len(nodes) == 1 for nodes in spread.sums) and fewest:
                    assert sums == fewest == dict.fromkeys(range(ranks), ranks - 1)


@pytest.mark.parametrize(
    ("counts", "direct", "least"),
    [((3, 3, 2), 2, 5 / 3), ((3, 3, 3, 3), 2.25, 2), ((5, 5, 5, 5), 3, 2.25), ((1, 2, 2, 1), 2.25, 1.75)],
)
def test_unaligned_blocks_make_every_plan_send_more(counts: tuple[int, ...], direct: float, least: float) -> None:
    """The parameters are the arrays that the busiest rank sends and the average minimum, both with the results."""
    spread, ranks = Spread.apart(counts), len(counts)
    assert max(sent_by(plan_for(spread, "direct"))) / ranks == direct
    assert (min(fewest_sums(spread, owner) for owner in range(ranks)) + ranks - 1) / ranks == pytest.approx(least)


@pytest.mark.parametrize("of_hosts", [(2, 2), (1, 3), (4, 4, 4, 4), (2, 1, 3), (4, 2, 2, 1)])
def test_the_link_of_a_host_carries_the_load_of_one_rank(of_hosts: tuple[int, ...]) -> None:
    """The load does not depend on the number of ranks behind the link if their replicas are one node of the tree."""
    places = tuple(host for host, ranks in enumerate(of_hosts) for _ in range(ranks))
    blocks = {1: (4,), 2: (2, 2), 3: (1, 1, 2), 4: (1, 1, 1, 1)}
    counts = [count for ranks in of_hosts for count in blocks[ranks]]
    plan = plan_for(Spread(tuple(counts), places), "direct")
    sent = [0] * len(of_hosts)
    for source, to, first, stop, _ in plan.messages():
        if places[source] != places[to]:
            sent[places[source]] += stop - first
    hosts = len(of_hosts)
    assert [bits * hosts for bits in sent] == [2 * (hosts - 1) * plan.slices] * hosts


def test_rounds_grow_with_the_logarithm_for_halving_and_doubling_but_not_for_direct_exchange() -> None:
    spread = Spread.apart([1] * 16)
    rounds = {
        way: len([each for each in plan_for(spread, way).rounds if each.messages]) for way in possible_ways(spread)
    }
    assert rounds == {"direct": 2, "halving": 8, "doubling": 4}


def test_the_spread_after_a_loss_adds_in_the_order_of_the_tree() -> None:
    spread = Spread.apart([3, 3, 2])
    assert possible_ways(spread) == ("direct",)
    assert spread.sums[1] == (TreeNode(3, 4), TreeNode(4, 6))
    check(spread)


def test_an_evaluation_finds_invalid_plans() -> None:
    """Without this, the other tests would prove little."""
    plan = plan_for(Spread.apart([1, 1, 1]), "direct")
    first, second = plan.rounds
    shorter = Plan(plan.name, plan.spread, plan.owners, (Round(first.additions, first.messages[1:]), second))
    with pytest.raises(KeyError):
        outcome(shorter)
    twice = Plan(plan.name, plan.spread, plan.owners, (Round((), first.messages + first.messages[:1]), second))
    with pytest.raises(AssertionError, match="already"):
        outcome(twice)
    early = Plan(plan.name, plan.spread, plan.owners, (Round((), (*first.messages, second.messages[0])), second))
    with pytest.raises(KeyError):
        outcome(early)
    swapped = [
        Message(each.source, each.to, each.first, each.stop, TreeNode(2, 3) if each.source == 1 else each.node)
        for each in first.messages
    ]
    with pytest.raises(KeyError):
        outcome(Plan(plan.name, plan.spread, plan.owners, (Round((), tuple(swapped)), second)))


@pytest.mark.parametrize(
    ("counts", "hosts", "message"),
    [((1, 0), (0, 0), "at least one"), ((1, 1), (0,), "one host per rank"), ((1, 1), (0, 2), "numbered from 0")],
)
def test_an_invalid_spread_is_refused(counts: tuple[int, ...], hosts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spread(counts, hosts)
