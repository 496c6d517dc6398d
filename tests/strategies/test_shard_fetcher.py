"""Copies of parts on other instances: which instance keeps which, and where rows are found after a loss."""

import numpy as np
import pytest

import collectives
from collectives.backends.thread import run_on_threads
from strategies.errors import LostPartError
from strategies.exchange.shard_fetcher import ShardFetcher
from strategies.stored_shards import StoredReplicas, distance_to_kept


@pytest.mark.parametrize(
    ("hosts", "distance"),
    [
        ([0, 0], 1),
        ([0, 1, 2], 1),
        ([0, 0, 1, 1], 2),
        ([0, 1, 0, 1], 1),
        ([0, 0, 0, 1], 1),
        ([0, 0, 1, 1, 2, 2], 2),
        ([0, 0, 0, 1, 1, 1], 3),
    ],
)
def test_an_instance_copies_the_parts_of_one_on_another_host(hosts, distance):
    assert distance_to_kept(hosts) == distance


def test_every_replica_is_driven_once_and_copied_once():
    for count in (2, 3, 5):
        holdings = [StoredReplicas.of(rank, [0] * count, 8, 0) for rank in range(count)]
        for blocks in ([each.own for each in holdings], [each.kept for each in holdings]):
            assert sorted(replica for block in blocks for replica in block) == list(range(8))


def rows_of(replicas):
    return np.array([[replica, replica + 100] for replica in replicas], np.uint8)


def fetched(holdings, wanted, steps=(3, 3, 3)):
    """Return the rows that each of three instances gets, given what it had."""

    def function(communicator):
        had = holdings[communicator.rank]
        rows = ShardFetcher(communicator, 8, had, steps[communicator.rank])
        return [each.tolist() for each in rows.fetch(wanted[communicator.rank], rows_of, 2, "x")]

    return run_on_threads(3, function, collectives.Settings())


def had(own, kept=range(0)):
    return StoredReplicas(own, kept, 3, 0, 1)


def test_rows_come_from_owners_copies_and_to_instances_without_any():
    """Instance 2 has joined; the rows of replicas 6 and 7 exist only as copies."""
    holdings = [had(range(0, 3), range(6, 8)), had(range(3, 6), range(0, 3)), None]
    wanted = [[range(2, 7)], [range(0), range(7, 8)], [range(0, 8)]]
    expected = [[rows_of(each).tolist() for each in of_rank] for of_rank in wanted]
    assert fetched(holdings, wanted) == expected


def test_rows_that_nobody_has_are_named():
    holdings = [had(range(0, 3)), had(range(3, 6)), None]
    with pytest.raises(LostPartError, match="of the state of replicas 6, 7 are lost: .* from its last checkpoint"):
        fetched(holdings, [[], [], []])


def test_rows_of_different_steps_are_refused():
    holdings = [had(range(0, 4)), had(range(4, 8)), None]
    with pytest.raises(LostPartError, match=r"parts of the states of steps \[3, 4\], which differ"):
        fetched(holdings, [[], [], []], steps=(3, 4, 0))
