"""Workers over gRPC that lose some of them: the others agree on who is left, and go on in a smaller group."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from cut_networks import HOSTS, unplug
from grpc_jobs import socket_addresses
from grpc_threads import LIMIT_S, WorkerThreads
from losing import Lost, meeting_point
from mpi_jobs import in_a_job
from watching import watched
from workers import Job, Worker, disposed_of, last_line, port_addresses, running

from collectives import (
    BrokenError,
    ClosedError,
    CollectiveError,
    CollectiveTimeoutError,
    Communicator,
    Limits,
    PeerLostError,
    Settings,
)
from collectives.backends.grpc import (
    GrpcLink,
    connect_survivors,
    has_joined,
    is_revoked,
    is_waiting,
    joiner_of,
    let_join,
    may_join,
)
from collectives.calls import Call
from collectives.clock import FakeClock
from collectives.instruments import Instruments
from collectives.network.security import TOKEN
from collectives.network.wire import DaemonThreads

SETTINGS = Settings(limits=Limits(timeout_s=LIMIT_S))
LONG_S = 1e6
ENTRIES = 7  # the number of results that a worker has read when it may join

pytestmark = pytest.mark.timeout(120)


class Events:
    """An instrument that counts the events of calls of a worker after `begin`, and ends the worker at one of them.

    Args:
        number: The number of the event, from 0; None to lose nobody.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.seen = 0
        self._counts = False

    @property
    def has_struck(self) -> bool:
        return self.number is not None and self.seen > self.number

    def begin(self) -> None:
        self._counts = True

    def end(self) -> None:
        self._counts = False

    def operation_begins(self, number: int, call: Call) -> None:
        self._note()

    def operation_ends(self) -> None:
        self._note()

    def data_moves(self, nbytes: int) -> None:
        self._note()

    def _note(self) -> None:
        self.seen += self._counts
        if self._counts and self.has_struck:
            self._counts = False
            raise Lost


def run(size: int, member: Callable[[int, Communicator], Any], *all_events: tuple[int, Events]) -> list[Any]:
    """Run `member` on every worker, each in its own thread, and return its result; the error of one that fails."""
    of = {rank: Instruments(events) for rank, events in all_events}
    pool = DaemonThreads()

    def one(group: WorkerThreads, rank: int) -> Any:
        communicator = group.connect(rank, shrinks=True, instruments=of.get(rank))
        try:
            return member(rank, communicator)
        except Lost:
            node_of(communicator).leave()
            return None

    with socket_addresses(size) as addresses:
        group = WorkerThreads(addresses)
        futures: list[Future[Any]] = [pool.submit(one, group, rank) for rank in range(size)]
        return [future.result(LIMIT_S) for future in futures]


def node_of(communicator: Communicator) -> Any:
    assert isinstance(communicator.link, GrpcLink)
    return communicator.link.node


def lose(communicator: Communicator) -> CollectiveError:
    """Reduce until another worker is lost or joins, and return the error."""
    while True:
        let_join(communicator, ENTRIES)
        if communicator.size == 1 and is_revoked(communicator):
            return PeerLostError("a worker that is alone waits for nobody")
        try:
            communicator.all_reduce(np.ones(3))
        except (PeerLostError, BrokenError) as error:
            return error


def go_on(communicator: Communicator, settings: Settings = SETTINGS) -> Communicator:
    again = connect_survivors(settings, communicator)
    communicator.abandon()
    return again


def left_by(rank: int, communicator: Communicator) -> list[int]:
    """Return the first ranks of the workers of a group, as all of them see it."""
    total = int(communicator.all_reduce(np.full(5, 1 << rank))[0])
    return [former for former in range(communicator.size + 10) if total >> former & 1]


@pytest.mark.parametrize(
    ("size", "lost"),
    [(2, [1]), (3, [0]), (3, [1]), (5, [1, 3])],
    ids=["the second of two", "the first of three", "the second of three", "two of five at once"],
)
def test_the_survivors_go_on_in_the_same_order(size: int, lost: list[int]) -> None:
    all_are_connected = meeting_point(size)

    def member(rank: int, communicator: Communicator) -> Any:
        communicator.barrier()
        all_are_connected.wait()
        if rank in lost:
            raise Lost
        assert f"rank {lost[0]} at" in str(lose(communicator)) or len(lost) > 1
        again, found = go_on(communicator), list(range(size))
        while len(found) > size - len(lost):  # the others are not lost in the same moment
            try:
                found = left_by(rank, again)
                if len(found) > size - len(lost):
                    lose(again)
                    again = go_on(again)
            except PeerLostError:
                again = go_on(again)
        again.close()
        return found, again.rank

    with watched() as warnings:
        found = run(size, member)
    left = [rank for rank in range(size) if rank not in lost]
    assert found == [(left, left.index(rank)) if rank in left else None for rank in range(size)]
    for rank in lost:
        told = warnings.containing(f"rank {rank} at ", "is lost: its program has failed", "on without it")
        assert len(left) <= len(told) <= len(left) * len(lost)  # twice if the other one was lost later
        assert all(f"rank {other} at" in text for text in told for other in left)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_workers_that_may_not_go_on_say_why(size: int) -> None:
    """The last worker may not, whether the others are lost at once or with agreements between them."""
    all_are_connected = meeting_point(size)

    def member(rank: int, communicator: Communicator) -> str | None:
        communicator.barrier()
        all_are_connected.wait()
        if rank < size - 1:
            raise Lost
        while True:
            lose(communicator)
            try:
                communicator = go_on(communicator)
            except PeerLostError as error:
                return str(error)

    *_, text = run(size, member)
    assert text is not None
    assert f"rank {size - 1} at" in text
    assert "cannot go on: 1 of " in text
    assert " workers are left, and only more than half of them go on, or half with rank " in text
    if size == 2:
        assert "cannot go on: 1 of 2 workers are left" in text
        assert "or half with rank 0 at" in text
        assert "rank 0 at" in text


def test_a_worker_may_be_lost_at_any_event_of_the_recovery() -> None:
    """The rest goes on without it, whether the loss comes before, between or after the calls of the new group."""
    strikes, number = True, 0
    while strikes:
        events = Events(number)
        gate = meeting_point(5)

        def member(rank: int, communicator: Communicator, events: Events = events, gate: Any = gate) -> Any:
            communicator.barrier()
            gate.wait()
            if rank == 4:
                raise Lost
            lose(communicator)
            if rank == 1:
                events.begin()
            settings = Settings(limits=SETTINGS.limits, progress=Instruments(events)) if rank == 1 else SETTINGS
            again = go_on(communicator, settings)
            try:
                found = left_by(rank, again)
                if rank == 1:
                    events.end()
                again.barrier()
            except PeerLostError:
                again = go_on(again)
                found = left_by(rank, again)
            again.close()
            return found

        found = run(5, member)
        strikes, number = events.has_struck, number + 1
        left = [0, 2, 3] if strikes else [0, 1, 2, 3]
        assert found == [left if rank in left else None for rank in range(5)]
    assert number > 2


def test_losses_one_after_another() -> None:
    """Each time more than half of the last membership are left, or half with the first worker."""
    gates = [meeting_point(size) for size in (5, 4, 3, 2)]

    def member(rank: int, communicator: Communicator) -> Any:
        for gate, lost in zip(gates, (4, 2, 3, 1), strict=True):
            communicator.barrier()
            gate.wait()
            if rank == lost:
                raise Lost
            lose(communicator)
            communicator = go_on(communicator)
        communicator.close()
        return communicator.size

    assert run(5, member) == [1, None, None, None, None]


def test_a_subgroup_ends_with_its_membership() -> None:
    """Its members are all there, but the lost worker ends the groups of all."""
    all_are_connected = meeting_point(4)

    def member(rank: int, communicator: Communicator) -> Any:
        pair = communicator.subgroup([0, 1]) if rank < 2 else None
        communicator.barrier()
        all_are_connected.wait()
        if rank == 3:
            raise Lost
        error = lose(pair or communicator)
        again = go_on(communicator)
        if pair is not None:
            pair.abandon()
        part = again.subgroup([0, 1]) if rank < 2 else again
        if rank < 2:
            part.barrier()
            part.close()
        found = left_by(rank, again)
        again.close()
        return found, type(error)

    assert run(4, member) == [([0, 1, 2], PeerLostError)] * 3 + [None]


def test_a_worker_that_misses_only_the_last_messages_learns_that_all_have_finished() -> None:
    all_are_connected, has_closed = meeting_point(3), meeting_point(2)

    def member(rank: int, communicator: Communicator) -> Any:
        communicator.barrier()
        all_are_connected.wait()
        if rank == 2:
            raise Lost
        if rank == 0:
            node = node_of(communicator)
            node.has_finished = True  # as if the lost worker's last message had come to this worker only
            node.leave()
            has_closed.wait()
            return None
        lose(communicator)
        has_closed.wait()
        with pytest.raises(ClosedError, match="all workers have finished"):
            connect_survivors(SETTINGS, communicator)
        return "ended"

    assert run(3, member) == [None, "ended", None]


def test_a_worker_that_the_others_have_given_up_ends_with_the_reason() -> None:
    all_are_connected = meeting_point(3)

    def member(rank: int, communicator: Communicator) -> Any:
        communicator.barrier()
        all_are_connected.wait()
        if rank == 0:
            node = node_of(communicator)
            node.lose(node.peers[1], "silent for 30 s")
        lose(communicator)
        try:
            again = go_on(communicator)
        except PeerLostError as error:
            return str(error)
        found = left_by(rank, again)
        again.close()
        return found

    first, given_up, last = run(3, member)
    assert first == last == [0, 2]
    assert given_up.endswith("cannot go on: the others go on without it (silent for 30 s)")


def test_workers_need_the_same_wish() -> None:
    with socket_addresses(2) as addresses:
        group = WorkerThreads(addresses)
        first = group.join(0, shrinks=True, connect_timeout_s=5.0)
        with pytest.raises(CollectiveError, match="which is .*going on without lost workers|gave up"):
            group.connect(1, connect_timeout_s=5.0)
        with pytest.raises(CollectiveError):
            first.result(LIMIT_S)


def test_without_the_wish_nothing_is_survived() -> None:
    with socket_addresses(2) as addresses:
        group = WorkerThreads(addresses)
        workers = [group.join(rank) for rank in range(2)]
        first, second = [worker.result(LIMIT_S) for worker in workers]
        second.abandon()
        with pytest.raises(PeerLostError):
            first.barrier()
        with pytest.raises(CollectiveError, match="shrinks"):
            connect_survivors(SETTINGS, first)
        first.abandon()


# ---- workers that are started again


def until_joined(communicator: Communicator) -> None:
    """Let a worker that was started again join, and return when the others have let it."""
    assert is_waiting(communicator)
    may_join(communicator, ENTRIES)
    node = communicator.beside.node
    with node.changed:
        assert node.clock.wait_for(node.changed, lambda: has_joined(communicator), LIMIT_S)


def run_again(size: int, lost: Sequence[int], events: Events | None = None) -> list[Any]:
    """Lose some workers, start them again one after another, and return the members as each worker sees them at last.

    Args:
        size: The number of workers.
        lost: Ranks of the workers that are lost.
        events: Events at one of which the first of them is lost once more while it joins.
    """
    gates = {count: meeting_point(count) for count in (size, size - len(lost) + 1)}
    pool = DaemonThreads()
    is_free = threading.Event()

    rest = [rank for rank in range(size) if rank not in lost]

    def go_on_until(rank: int, communicator: Communicator, is_over: Callable[[list[int]], bool]) -> Communicator:
        found: list[int] = []
        while not is_over(found):
            lose(communicator)
            communicator = go_on(communicator)
            with contextlib.suppress(PeerLostError):
                found = left_by(rank, communicator)
        return communicator

    def survive(rank: int, communicator: Communicator) -> list[int]:
        communicator = go_on_until(rank, communicator, lambda found: found == rest)
        gates[size - len(lost) + 1].wait()  # nobody joins before all have gone on without the lost ones
        is_free.set()
        is_struck = events is not None and events.number is not None
        last = rest if is_struck else list(range(size))
        communicator = go_on_until(rank, communicator, lambda found: found == last)
        communicator.close()
        return last

    def join(group: WorkerThreads, rank: int) -> list[int] | None:
        communicator = group.connect(rank, shrinks=True)
        node = communicator.beside.node
        settings = SETTINGS
        if events is not None:
            settings = Settings(limits=SETTINGS.limits, progress=Instruments(events))
        try:
            until_joined(communicator)
            if events is not None:
                events.begin()
            again = connect_survivors(settings, communicator)
            found: list[int] = []
            while len(found) < size:
                with contextlib.suppress(PeerLostError):
                    found = left_by(rank, again)
                if len(found) < size:
                    lose(again)
                    again = go_on(again)
            if events is not None:
                events.end()
            again.close()
        except Lost:
            node.leave()
            return None
        return found

    def one(group: WorkerThreads, rank: int) -> Any:
        communicator = group.connect(rank, shrinks=True)
        communicator.barrier()
        gates[size].wait()
        if rank not in lost:
            return survive(rank, communicator)
        node_of(communicator).leave()
        if rank == lost[0]:
            gates[size - len(lost) + 1].wait()
        return join(group, rank) if is_free.wait(LIMIT_S) else None

    with socket_addresses(size) as addresses:
        group = WorkerThreads(addresses)
        futures = [pool.submit(one, group, rank) for rank in range(size)]
        return [future.result(LIMIT_S) for future in futures]


def survivors_of(group: WorkerThreads, lost: Sequence[int]) -> list[Communicator]:
    """Connect workers, lose some of them, and return the communicators with which the others have gone on."""
    pool = DaemonThreads()
    workers = [group.join(rank, shrinks=True) for rank in range(len(group.addresses))]
    communicators = [worker.result(LIMIT_S) for worker in workers]
    for rank in lost:
        node_of(communicators[rank]).leave()
    left = [each for each in communicators if each.rank not in lost]
    return [again.result(LIMIT_S) for again in [pool.submit(go_on, each) for each in left]]


def link_with_joiner(communicator: Communicator) -> GrpcLink:
    """Return the link with a worker that was started again, as soon as both are connected."""
    node = node_of(communicator)
    with node.changed:
        assert node.clock.wait_for(node.changed, lambda: joiner_of(communicator) is not None, LIMIT_S)
    link = joiner_of(communicator)
    assert isinstance(link, GrpcLink)
    return link


def test_the_second_of_two_lost_workers_may_join_alone() -> None:
    with socket_addresses(5) as addresses:
        group = WorkerThreads(addresses)
        first, *others = survivors_of(group, lost=[1, 3])
        assert joiner_of(first) is None
        again = group.connect(3, shrinks=True)
        assert is_waiting(again)
        assert link_with_joiner(first).members == [0, 3]
        for each in (first, *others, again):
            each.abandon()


def test_two_lost_workers_that_wait_together_join_one_after_another() -> None:
    """The second one is brought up when the first one has joined, and meets it then at the latest."""
    with socket_addresses(4) as addresses:
        group, pool = WorkerThreads(addresses), DaemonThreads()
        members = survivors_of(group, lost=[1, 3])
        later = group.connect(3, shrinks=True)
        assert link_with_joiner(members[0]).members == [0, 3]
        for rank, again in ((3, later), (1, group.connect(1, shrinks=True))):
            assert link_with_joiner(members[0]).members == [0, rank]
            may_join(again, ENTRIES)
            give_up = time.monotonic() + LIMIT_S
            while not is_revoked(members[0]):
                assert time.monotonic() < give_up, "it is not ready to join"
                let_join(members[0], ENTRIES)
                time.sleep(0.01)
            left = [pool.submit(go_on, each) for each in members]
            until_joined(again)
            members = [*(each.result(LIMIT_S) for each in left), go_on(again)]
        assert [each.size for each in members] == [4] * 4
        for each in members:
            each.abandon()


def test_the_journal_reaches_a_worker_that_has_heard_of_a_later_membership() -> None:
    """The others enter a membership one after another, and the worker that waits to join may hear of it between."""
    with socket_addresses(3) as addresses:
        group, pool = WorkerThreads(addresses), DaemonThreads()
        left = survivors_of(group, lost=[2])
        again = group.connect(2, shrinks=True)
        source, to = link_with_joiner(left[0]), again.beside
        assert isinstance(to, GrpcLink)
        left = [each.result(LIMIT_S) for each in [pool.submit(go_on, each) for each in left]]
        node = to.node
        with node.changed:
            assert node.clock.wait_for(node.changed, lambda: node.recovery.agreement.view.epoch == 2, LIMIT_S)
        sent, got = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
        source.send(sent, 1, lane=0)
        transfer = to.receive(got, 0, lane=0)
        give_up = node.clock.now_s() + 20.0
        while not transfer.done():
            assert node.clock.now_s() < give_up, "the journal has not come"
            to.pause(1.0)
        np.testing.assert_array_equal(got, sent)
        for each in (*left, again):
            each.abandon()


def test_no_worker_is_started_again_before_the_others_have_gone_on_without_it() -> None:
    """Otherwise its messages would serve for those of the lost worker, in a step that this one has not completed."""
    with socket_addresses(2) as addresses:
        group = WorkerThreads(addresses)
        workers = [group.join(rank, shrinks=True) for rank in range(2)]
        first, second = [worker.result(LIMIT_S) for worker in workers]
        node_of(first).leave()
        clock = FakeClock(tick_s=0.01)
        with watched() as warnings:
            again = group.join(0, shrinks=True, connect_timeout_s=LONG_S, clock=clock)
            warnings.wait_for(1, "have not gone on without rank 0")
        clock.advance(2 * LONG_S)
        with pytest.raises(CollectiveTimeoutError):
            again.result(LIMIT_S)
        with pytest.raises(PeerLostError):
            second.all_reduce(np.ones(3))
        with pytest.raises(PeerLostError, match="cannot go on"):
            connect_survivors(SETTINGS, second)
        second.abandon()


@pytest.mark.parametrize(("size", "lost"), [(2, [1]), (3, [0]), (3, [1]), (5, [1, 3])])
def test_lost_workers_that_are_started_again_join(size: int, lost: list[int]) -> None:
    assert run_again(size, lost) == [list(range(size))] * size


def test_a_lost_worker_waits_for_another_one_that_is_about_to_join() -> None:
    """The one that is about to join answers with its progress, as it has no view of the members."""
    with socket_addresses(5) as addresses:
        group, pool = WorkerThreads(addresses), DaemonThreads()
        left = survivors_of(group, lost=[1, 3])
        early = group.connect(3, shrinks=True)
        link_with_joiner(left[0])
        may_join(early, ENTRIES)
        late, node = group.join(1, shrinks=True), early.beside.node
        with node.changed:
            assert node.clock.wait_for(node.changed, lambda: node.peers[1].is_here, LIMIT_S)

        def let_in(communicator: Communicator) -> Communicator:
            lose(communicator)
            return go_on(communicator)

        futures = [pool.submit(let_in, each) for each in left]
        until_joined(early)
        members = [connect_survivors(SETTINGS, early), *(each.result(LIMIT_S) for each in futures)]
        assert is_waiting(late.result(LIMIT_S))
        for each in (*members, late.result()):
            each.abandon()


def test_a_worker_that_joins_may_be_lost_at_any_event() -> None:
    counted = Events(None)
    assert run_again(3, [1], counted) == [[0, 1, 2]] * 3
    assert counted.seen == 3
    for number in range(counted.seen):
        assert run_again(3, [1], Events(number)) == [[0, 2], None, [0, 2]]


def test_a_worker_that_may_join_and_does_not_come_is_given_up_at_the_limit() -> None:
    with socket_addresses(4) as addresses:
        group, pool = WorkerThreads(addresses), DaemonThreads()
        left = survivors_of(group, lost=[1])
        late = group.connect(1, shrinks=True)
        may_join(late, ENTRIES)

        def go_on_without(communicator: Communicator) -> list[int]:
            lose(communicator)
            again = go_on(communicator, Settings(limits=Limits(timeout_s=LIMIT_S, clock=FakeClock(tick_s=0.1))))
            error = lose(again)
            assert re.search("rank 1 at .* is lost: it has not joined within timeout_s = 60", str(error))
            again = go_on(again)
            found = left_by(again.rank, again)
            again.abandon()
            return found

        assert [each.result(LIMIT_S) for each in [pool.submit(go_on_without, each) for each in left]] == [[0, 1, 2]] * 3
        with pytest.raises(PeerLostError, match="the others go on without it .it has not joined"):
            connect_survivors(SETTINGS, late)


def test_a_member_gives_up_a_worker_that_joins_and_that_it_cannot_reach() -> None:
    """The link between these two has broken before the first member lets the worker join."""
    with socket_addresses(4) as addresses:
        group, pool = WorkerThreads(addresses), DaemonThreads()
        left = survivors_of(group, lost=[1])
        again = group.connect(1, shrinks=True)
        link_with_joiner(left[0])
        last = node_of(left[-1])
        last.lose(last.peers[1], "its connection broke")
        may_join(again, ENTRIES)

        def go_on_without(communicator: Communicator) -> list[int]:
            found: list[int] = []
            lose(communicator)
            for _ in range(3):
                communicator = go_on(communicator)
                with contextlib.suppress(PeerLostError):
                    found = left_by(communicator.rank, communicator)
                    break
            communicator.abandon()
            return found

        found = [each.result(LIMIT_S) for each in [pool.submit(go_on_without, each) for each in left]]
        assert found == [[0, 1, 2]] * 3
        again.abandon()


# ---- processes


def until_first_round(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.wait_for("round 1 was right")


def assert_go_on(workers: Sequence[Worker], count: int) -> None:
    """Assert that workers go on in a group of that size, and end well."""
    for worker in workers:
        worker.wait_for("goes on as rank", f"of {count}")
        worker.wait_for("round 1 was right", count=2)
    for worker in workers:
        worker.finish()
    for worker in workers:
        assert worker.end() == 0, worker.text


@in_a_job
def test_the_others_go_on_without_a_killed_worker() -> None:
    with running(Job(port_addresses(3), ["--shrinks"], {TOKEN: "secret"}), "rounds") as workers:
        until_first_round(workers)
        workers.pop(0).kill()
        assert_go_on(workers, 2)


@in_a_job
@pytest.mark.complete
def test_the_others_go_on_without_a_stopped_worker_which_then_ends() -> None:
    """The stop lasts longer than `stall_warning_s`."""
    addresses = port_addresses(3)
    job = Job(addresses, ["--shrinks", "--stall-warning-s", "6"], {TOKEN: "secret"})
    with running(job, "rounds") as workers:
        until_first_round(workers)
        workers[1].stop()
        others = [workers[0], workers[2]]
        for worker in others:
            worker.wait_for(f"rank 1 at {addresses[1]} is lost: silent for", "is it stopped?", "on without it")
            worker.wait_for("goes on as rank")
        workers[1].resume()
        assert workers[1].end() == 1, workers[1].text
        assert "the others go on without it (silent for" in last_line(workers[1])
        assert_go_on(others, 2)


@in_a_job
@pytest.mark.complete
def test_the_larger_part_of_a_cut_network_goes_on(hosts: Sequence[str]) -> None:
    """The worker behind the cut ends, and says why."""
    addresses = [f"{HOSTS[0]}:3737", f"{HOSTS[0]}:3738", f"{HOSTS[1]}:3737"]
    job = Job(addresses, ["--shrinks"], {"POPDIST_GRPC_INSECURE": "1", TOKEN: "secret"})
    with on_hosts(job, [hosts[0], hosts[0], hosts[1]]) as workers:
        until_first_round(workers)
        unplug(hosts[0])
        alone = workers.pop()
        assert alone.end() == 1, alone.text
        assert "cannot go on: 1 of 3 workers are left" in last_line(alone)
        assert_go_on(workers, 2)


@contextlib.contextmanager
def on_hosts(job: Job, hosts: Sequence[str]) -> Iterator[list[Worker]]:
    with disposed_of() as workers:
        for rank, host in enumerate(hosts):
            workers.append(job.start("rounds", rank, prefix=["ip", "netns", "exec", host]))
        yield workers.copy()
