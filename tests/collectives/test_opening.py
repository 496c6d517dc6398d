"""Short reductions that begin with the comparison of calls: the messages that they save, and their safety."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from losing import LIMITS, run_members
from reference import contributions, reduced
from statements import assert_same_bits

from collectives import Communicator, LayoutMismatchError, Settings, ThreadHub, run_on_threads
from collectives.backends.thread import connect

SETTINGS = Settings(mechanism="window", limits=LIMITS)
UNEVEN_HOSTS = (0, 1, 1, 1, 2, 2, 3, 4)
TWO_HOSTS, FOUR_HOSTS = (0, 0, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)
SHORT = 50_000  # elements: too many to travel along, few enough to begin at once


def messages_of(hosts: Sequence[int], collective: Callable[[Communicator], object]) -> list[int]:
    """Return the number of messages that the ranks of each host send over links, without those inside of the host."""
    sent = [0] * len(hosts)

    def count(source: int, to: int) -> None:
        sent[source] += 1

    hub = ThreadHub(len(hosts), count, hosts)

    def member(rank: int) -> int:
        with connect(SETTINGS, hub, rank) as communicator:
            collective(communicator)
            before = sent[rank]
            collective(communicator)
            return sent[rank] - before

    of_ranks = run_members(hub, member)
    return [
        sum(of_ranks[rank] or 0 for rank in range(len(hosts)) if hosts[rank] == host) for host in sorted(set(hosts))
    ]


@pytest.mark.parametrize(
    ("hosts", "elements", "messages"),
    [
        (TWO_HOSTS, 100, 1),  # the whole reduction travels with the comparison
        (
            FOUR_HOSTS,
            SHORT,
            3 + 3,
        ),  # the first round does, the second has the results; one rank of each host sends them
        (TWO_HOSTS, 1 << 17, 1 + 2 * 2),  # the comparison, and two rounds with a message of each rank
        (FOUR_HOSTS, 1 << 18, 3 + 2 * 2 * 3),
        (range(5), 70_000, 4 + 4),
    ],
)
def test_a_host_sends_few_messages(hosts: Sequence[int], elements: int, messages: int) -> None:
    def add_up(communicator: Communicator) -> np.ndarray:
        return communicator.ordered_all_reduce([np.ones(elements, np.float32)])

    assert messages_of(hosts, add_up) == [messages] * len(set(hosts))


def test_a_reduce_scatter_begins_with_the_comparison() -> None:
    def scatter(communicator: Communicator) -> np.ndarray:
        return communicator.ordered_reduce_scatter([np.ones(70_000, np.float32)])

    assert messages_of(range(5), scatter) == [4] * 5


def test_the_comparison_among_more_than_eight_hosts_takes_log2_messages() -> None:
    assert messages_of(range(8), lambda communicator: communicator.barrier()) == [7] * 8
    assert messages_of(range(9), lambda communicator: communicator.barrier()) == [4] * 9


@pytest.mark.parametrize("hosts", [FOUR_HOSTS, UNEVEN_HOSTS])
@pytest.mark.parametrize("counts", [(2, 2, 1, 1, 1, 1, 1, 1), (1, 2, 2, 1, 1, 2, 2, 1), (1, 1, 1, 1, 1, 1, 1, 2)])
def test_a_wrong_guess_of_the_numbers_of_contributions_is_repaired(
    counts: tuple[int, ...], hosts: Sequence[int]
) -> None:
    everything = contributions("float32", SHORT, range(sum(counts)))
    expected = reduced(everything, "mean")

    def program(communicator: Communicator) -> None:
        first = sum(counts[: communicator.rank])
        mine = everything[first : first + counts[communicator.rank]]
        for _ in range(3):
            assert_same_bits(communicator.ordered_all_reduce(mine, op="mean"), expected)

    run_on_threads(8, program, SETTINGS, hosts)


@pytest.mark.parametrize("hosts", [FOUR_HOSTS, UNEVEN_HOSTS])
@pytest.mark.parametrize("others", [{2, 3}, {1}, {0, 7}, {0, 1, 2, 3}])
@pytest.mark.parametrize("length", [SHORT // 2, SHORT, 5 * SHORT])
def test_a_different_call_of_some_ranks_spoils_no_begun_reduction(
    others: set[int], length: int, hosts: Sequence[int]
) -> None:
    everything = contributions("float32", length, range(8))

    def program(communicator: Communicator) -> None:
        rank = communicator.rank
        mine = everything[rank].copy()
        with pytest.raises(LayoutMismatchError, match="'kernel'.*'bias'|'bias'.*'kernel'"):
            communicator.all_reduce(mine, name="bias" if rank in others else "kernel")
        assert_same_bits(mine, everything[rank])
        if rank in others:
            with pytest.raises(LayoutMismatchError):
                communicator.barrier()
        else:
            with pytest.raises(LayoutMismatchError):
                communicator.all_reduce(mine)
        assert_same_bits(communicator.all_reduce(mine), reduced(everything, "sum"))

    run_on_threads(8, program, SETTINGS, hosts)
