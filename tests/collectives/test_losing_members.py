"""The loss of a rank of a thread hub: the waits of the others end, and the rest continues in a smaller group."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from losing import LIMITS, Lost, OnMessage, meeting_point, run_members

import collectives
from collectives import BrokenError, CollectiveError, CollectiveTimeoutError, PeerLostError, Settings, ThreadHub
from collectives.backends.thread import connect_survivors

GUARD_S = 60
MECHANISMS = ("ring", "window")
OPERATIONS = {
    "all_reduce": lambda communicator: communicator.all_reduce(np.ones(3)),
    "a long all_reduce": lambda communicator: communicator.all_reduce(np.ones(1 << 17)),
    "broadcast": lambda communicator: communicator.broadcast(np.ones(3)),
    "all_gather": lambda communicator: communicator.all_gather(np.ones(3)),
    "reduce_scatter": lambda communicator: communicator.reduce_scatter(np.ones(3 * communicator.size)),
    "barrier": lambda communicator: communicator.barrier(),
    "in a subgroup": lambda communicator: communicator.subgroup([2, 1, 0]).barrier(),
    "start_all_reduce": lambda communicator: communicator.start_all_reduce(np.ones(3), name="later").wait(),
}

pytestmark = pytest.mark.timeout(2 * GUARD_S)


@pytest.fixture(params=MECHANISMS)
def settings(request):
    return Settings(mechanism=request.param, limits=LIMITS)


def connect(settings, hub, rank):
    return collectives.connect("thread", settings, hub=hub, rank=rank)


def raised_by(function, *arguments):
    with pytest.raises(CollectiveError) as caught:
        function(*arguments)
    return caught.value


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_ranks_that_wait_for_a_lost_rank_get_an_error_that_names_it(settings, operation):
    hub = ThreadHub(3)
    all_are_connected = meeting_point(3)

    def member(rank):
        communicator = connect(settings, hub, rank)
        all_are_connected.wait()
        if rank == 1:
            raise Lost
        error = raised_by(operation, communicator)
        hub.revoke()
        communicator.abandon()
        return type(error), str(error)

    first, lost, last = run_members(hub, member)
    assert lost is None
    for kind, text in (first, last):
        assert kind is PeerLostError
        assert "rank 1 is lost" in text


def test_the_error_gives_the_reason_of_the_loss(settings):
    hub = ThreadHub(2)

    def member(rank):
        communicator = connect(settings, hub, rank)
        if rank == 1:
            raise ValueError("no such image")
        error = raised_by(communicator.barrier)
        assert "rank 1 has failed: ValueError: no such image" in str(error)
        assert "for rank 1 in barrier" in str(error)
        assert isinstance(raised_by(communicator.barrier), BrokenError)

    with pytest.raises(ValueError, match="no such image"):
        run_members(hub, member)


def test_a_message_sent_before_the_loss_still_arrives():
    hub = ThreadHub(2)

    def member(rank):
        communicator = connect(Settings(mechanism="ring", limits=LIMITS), hub, rank)
        values = np.arange(4.0) if rank == 1 else np.zeros(4)
        communicator.broadcast(values, 1)  # the sender does not wait for its arrival
        if rank == 1:
            raise Lost
        communicator.abandon()
        return values.tolist()

    assert run_members(hub, member) == [[0.0, 1.0, 2.0, 3.0], None]


def test_a_wait_for_another_rank_lasts_until_the_group_is_revoked(settings):
    hub = ThreadHub(3)
    hub.lose(2)
    assert hub.why_not_wait(0, [1]) == ""
    assert hub.why_not_wait(0, [1, 2]) == "rank 2 is lost"
    hub.revoke()
    assert hub.why_not_wait(0, [1]) == "rank 2 is lost"


def test_revoking_ends_a_wait_for_a_living_rank(settings):
    hub = ThreadHub(2)

    def member(rank):
        communicator = connect(settings, hub, rank)
        if rank == 1:
            hub.revoke()
            return ""
        return str(raised_by(communicator.barrier))

    assert "the others go on without this group; rank 0 has waited" in run_members(hub, member)[0]


# ---- the remaining ranks


def go_on(settings, hub, rank):
    """Connect with the remaining ranks, and return their ranks in `hub`."""
    communicator = connect_survivors(settings, hub, rank)
    assert hub.newest(rank)[1] == communicator.rank
    total = communicator.all_reduce(np.full(5, 1 << rank))
    found = [former for former in range(hub.size) if total[0] >> former & 1]
    assert found.index(rank) == communicator.rank
    assert found == hub.survivors()
    communicator.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_remaining_ranks_meet_in_the_same_order(settings, size):
    for count in range(1, size):
        for lost in combinations(range(size), count):
            hub, all_are_connected = ThreadHub(size), meeting_point(size)

            def member(rank, hub=hub, lost=lost, all_are_connected=all_are_connected):
                communicator = connect(settings, hub, rank)
                all_are_connected.wait()
                if rank in lost:
                    raise Lost
                raised_by(communicator.barrier)
                communicator.abandon()
                return go_on(settings, hub, rank)

            left = [rank for rank in range(size) if rank not in lost]
            assert run_members(hub, member) == [left if rank in left else None for rank in range(size)]


def test_ranks_may_be_lost_one_after_another(settings):
    hub = ThreadHub(4)
    all_are_connected = {2: meeting_point(4), 0: meeting_point(3), 3: meeting_point(2)}

    def member(rank):
        communicator = connect(settings, hub, rank)
        for lost in (2, 0, 3):
            all_are_connected[lost].wait()
            if rank == lost:
                raise Lost
            raised_by(communicator.barrier)
            communicator.abandon()
            communicator = connect_survivors(settings, hub, rank)
        return communicator.rank, communicator.size

    assert run_members(hub, member) == [None, (0, 1), None, None]
    assert hub.survivors() == [1]


def test_a_rank_may_be_lost_at_any_message_while_the_others_meet():
    """The messages include those that agree on a window; the ranks that remain at last agree on their group."""
    settings = Settings(mechanism="window", limits=LIMITS)
    strikes, number = True, 0
    while strikes:
        fault = OnMessage(1, number)
        hub, all_are_connected = ThreadHub(4, fault), meeting_point(4)

        def member(rank, hub=hub, fault=fault, all_are_connected=all_are_connected):
            communicator = connect(settings, hub, rank)
            all_are_connected.wait()
            if rank == 3:
                raise Lost
            raised_by(communicator.barrier)
            communicator.abandon()
            if rank == 1:
                fault.begin()
            again = connect_survivors(settings, hub, rank)
            if rank == 1:
                fault.end()
            try:
                again.barrier()
            except CollectiveError:  # rank 1 was lost between two messages to the others
                again.abandon()
                again = connect_survivors(settings, hub, rank)
                again.barrier()
            return hub.survivors()

        found = run_members(hub, member)
        strikes, number = fault.has_struck, number + 1
        left = [0, 2] if strikes else [0, 1, 2]
        assert found == [left if rank in left else None for rank in range(4)]
    assert number > 2


def two_barriers(communicator):
    """Call two barriers: shared memory may hold the arrival of the others at the first one, but not at the second."""
    communicator.barrier()
    communicator.barrier()


def test_a_living_rank_that_the_others_have_given_up_gets_an_error(settings):
    """The rank was cut off, or stopped for so long that the others gave it up."""
    hub = ThreadHub(3)
    all_are_connected, have_gone_on = meeting_point(3), meeting_point(3)

    def member(rank):
        communicator = connect(settings, hub, rank)
        all_are_connected.wait()
        if rank != 1:
            raised_by(communicator.barrier)
            found = go_on(settings, hub, rank)
            have_gone_on.wait()
            return found
        hub.lose(1, "rank 1 was cut off")
        have_gone_on.wait()
        errors = [raised_by(two_barriers, communicator), raised_by(connect_survivors, settings, hub, rank)]
        assert all(isinstance(error, PeerLostError) for error in errors)
        return [str(error) for error in errors]

    first, [in_call, going_on], last = run_members(hub, member)
    assert first == last == [0, 2]
    assert "rank 1 was cut off" in in_call
    assert going_on == "rank 1 cannot go on with the others: rank 1 was cut off"


def test_absent_ranks_are_named_at_the_limit():
    hub = ThreadHub(4)
    hub.lose(0)
    with pytest.raises(CollectiveTimeoutError, match="rank 1 has waited for rank 2, 3 to go on .* timeout_s = 0.01"):
        hub.shrink(1, 0.01)


def test_a_later_subgroup_has_lost_the_same_rank():
    hub = ThreadHub(3)
    hub.lose(2)
    part = hub.subgroup((0, 2), 0)
    assert part.why_not_wait(0, [1]) == "rank 2 is lost"
    hub.revoke()
    assert hub.subgroup((0, 1), 0).why_not_wait(0, [1])


def test_a_group_without_losses_may_be_revoked():
    hub = ThreadHub(2)
    hub.revoke()
    assert hub.why_not_wait(0, [1]) == "the others go on without this group"
