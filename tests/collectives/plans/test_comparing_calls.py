"""Who tells whom what it calls: pure plans."""

from __future__ import annotations

import pytest

from collectives.plans.comparing import Relay, relays

SPREADS = {
    "apart": tuple(range(5)),
    "together": (0,) * 4,
    "two by two": (0, 0, 1, 1, 2, 2, 3, 3),
    "uneven": (0, 0, 0, 1, 2, 2),
    "mixed up": (0, 1, 0, 2, 1),
}


def assert_all_know_all(hosts: tuple[int, ...], rounds: tuple[tuple[Relay, ...], ...]) -> None:
    """And nobody is told anything twice, or passes on what it does not know yet."""
    known = [{rank} for rank in range(len(hosts))]
    for each in rounds:
        before = [set(of_rank) for of_rank in known]
        for source, to, ranks in each:
            assert source != to
            assert before[source].issuperset(ranks)
            assert known[to].isdisjoint(ranks)
            known[to].update(ranks)
    assert known == [set(range(len(hosts)))] * len(hosts)


@pytest.mark.parametrize("hosts", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("at_once", [1, 8])
def test_in_the_end_all_know_what_all_call(hosts: tuple[int, ...], at_once: int) -> None:
    assert_all_know_all(hosts, relays(hosts, at_once))


@pytest.mark.parametrize("hosts", range(1, 34))
def test_many_hosts_need_as_many_rounds_as_their_number_has_bits(hosts: int) -> None:
    rounds = relays(tuple(range(hosts)), 1)
    assert len(rounds) == (hosts - 1).bit_length()
    assert_all_know_all(tuple(range(hosts)), rounds)
    for each in rounds:
        assert sorted(message.source for message in each) == list(range(hosts))


def test_few_hosts_need_one_round_between_them_and_one_inside() -> None:
    inside, between = relays(SPREADS["two by two"])
    assert {(source, to) for source, to, _ in inside} == {(rank, rank ^ 1) for rank in range(8)}
    assert len(between) == 4 * 3 * 2
    assert all(message.ranks == (message.source & ~1, message.source | 1) for message in between)


def test_a_thousand_ranks_on_hosts_of_eight_compare_in_eight_rounds() -> None:
    """Each sends 7 messages on its host, and 7 more to others."""
    rounds = relays(tuple(rank // 8 for rank in range(1024)))
    assert len(rounds) == 1 + 7
    sent = [message.source for each in rounds for message in each]
    assert {sent.count(rank) for rank in (0, 5, 1023)} == {14}
