"""The loss of a rank on hosts with shared memory: at any message that leaves the host, or between calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from losing import LIMITS, Lost, OnMessage, meeting_point, run_members
from reference import contributions, reduced
from statements import assert_same_bits

from collectives import CollectiveError, Communicator, PeerLostError, Settings, ThreadHub
from collectives.backends.thread import connect, connect_survivors

HOSTS, THREE_HOSTS = ("a", "a", "b", "b"), ("a", "a", "b", "c")
SETTINGS = Settings(mechanism="window", limits=LIMITS)
LENGTH = 80_000
GRADIENTS = contributions("float32", LENGTH, range(4))

pytestmark = pytest.mark.timeout(120)


def assert_adds_up(communicator: Communicator, length: int = LENGTH) -> None:
    """Assert that the remaining ranks, which share all contributions, get the sum."""
    borders = [4 * number // communicator.size for number in range(communicator.size + 1)]
    gradients = [array[:length] for array in GRADIENTS]
    mine = gradients[borders[communicator.rank] : borders[communicator.rank + 1]]
    assert_same_bits(communicator.ordered_all_reduce(mine), reduced(gradients, "sum"))


def lost_at(number: int, lost: int, length: int, hosts: Sequence[str]) -> tuple[bool, list[list[int] | None]]:
    """Return whether the rank had this many messages to send, and each rank's view of the remaining ranks."""
    fault = OnMessage(lost, number)
    hub = ThreadHub(4, fault, hosts)
    nobody_is_inside = meeting_point(4)

    def member(rank: int) -> list[int]:
        communicator = connect(SETTINGS, hub, rank)
        assert communicator.mechanism == "window and ring"
        assert_adds_up(communicator)
        nobody_is_inside.wait()
        if rank == lost:
            fault.begin()
        try:
            for _ in range(2):
                assert_adds_up(communicator, length)
            if rank == lost:
                fault.end()
            communicator.barrier()  # a rank with all its data learns here of another rank's failure
        except CollectiveError:
            communicator.abandon()
            communicator = connect_survivors(SETTINGS, hub, rank)
            assert_adds_up(communicator)
        communicator.close()
        return hub.survivors()

    found = run_members(hub, member)
    return fault.has_struck, found


@pytest.mark.parametrize(
    ("lost", "length", "messages"),
    [
        (0, LENGTH, 6),  # rank 0 speaks for its host: two reductions with a comparison and two rounds
        (3, LENGTH, 4),
        (3, 40_000, 8),  # rank 3 is alone on its host: the first round goes with the comparison
    ],
)
def test_the_others_go_on_to_the_same_bits_after_any_last_message(lost: int, length: int, messages: int) -> None:
    left = [rank for rank in range(4) if rank != lost]
    number, strikes = 0, True
    while strikes:
        strikes, found = lost_at(number, lost, length, HOSTS if length == LENGTH else THREE_HOSTS)
        everybody = [left if rank != lost else None for rank in range(4)] if strikes else [[0, 1, 2, 3]] * 4
        assert found == everybody
        number += 1
    assert number == messages + 1


@pytest.mark.parametrize("lost", [[1], [0, 1], [0, 2, 3]])
def test_an_absent_rank_is_lost_for_its_neighbours_on_the_host(lost: list[int]) -> None:
    hub = ThreadHub(4, hosts=HOSTS)
    left = [rank for rank in range(4) if rank not in lost]
    all_are_connected = meeting_point(4)

    def member(rank: int) -> str:
        communicator = connect(SETTINGS, hub, rank)
        all_are_connected.wait()
        if rank in lost:
            raise Lost
        with pytest.raises(PeerLostError) as caught:
            communicator.all_reduce(np.ones(LENGTH, np.float32))
        communicator.abandon()
        hub.revoke()
        again = connect_survivors(SETTINGS, hub, rank)
        assert_adds_up(again)
        return f"{again.mechanism}: {caught.value}"

    for rank, text in enumerate(run_members(hub, member)):
        if rank in lost:
            assert text is None
        else:
            mechanism, _, why = str(text).partition(":")
            assert "is lost" in why
            assert mechanism == ("window and ring" if len(left) == 3 else "window")
