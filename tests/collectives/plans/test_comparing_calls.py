"""Plans for the comparison of calls between ranks."""

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
    """Assert that all ranks know all calls, that none is told twice, and that none forwards an unknown call."""
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
def test_all_ranks_know_all_calls_in_the_end(hosts: tuple[int, ...], at_once: int) -> None:
    assert_all_know_all(hosts, relays(hosts, at_once))


@pytest.mark.parametrize("hosts", range(1, 34))
def test_the_number_of_rounds_is_the_bit_length_of_the_number_of_hosts(hosts: int) -> None:
    rounds = relays(tuple(range(hosts)), 1)
    assert len(rounds) == (hosts - 1).bit_length()
    assert_all_know_all(tuple(range(hosts)), rounds)
    for each in rounds:
        assert sorted(message.source for message in each) == list(range(hosts))


def test_few_hosts_need_one_round_between_them_and_two_inside() -> None:
    """One rank speaks for each host, so that a pair of hosts exchanges one message in each direction."""
    inside, between, news = relays(SPREADS["two by two"])
    assert {(source, to) for source, to, _ in inside} == {(rank, rank ^ 1) for rank in range(8)}
    assert {(source, to) for source, to, _ in between} == {(a, b) for a in (0, 2, 4, 6) for b in (0, 2, 4, 6) if a != b}
    assert all(message.ranks == (message.source, message.source + 1) for message in between)
    assert [message for message in news if message.to == 3] == [Relay(2, 3, (0, 1, 4, 5, 6, 7))]


def test_a_thousand_ranks_on_hosts_of_eight_compare_in_nine_rounds() -> None:
    rounds = relays(tuple(rank // 8 for rank in range(1024)))
    assert len(rounds) == 1 + 7 + 1
    sent = [message.source for each in rounds for message in each]
    assert (sent.count(0), sent.count(5)) == (7 + 7 + 7, 7)
