"""Spares: who becomes active at a change, and the journal that they get."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from grpc_jobs import socket_addresses
from grpc_threads import WorkerThreads

import collectives
import popdist
from collectives import Settings, ThreadHub
from collectives.errors import BrokenError, PeerLostError
from popdist.context import join_besides
from popdist.errors import LifeCycleError
from popdist.instance import Instance
from popdist.membership.process import member, process
from popdist.membership.standby import BLOCK, Entries, Fed, Feeding, KeptJournal, Standing, choose, joined
from popdist.records.progress import Role

A, L, S = Role.ACTIVE, Role.LEAVING, Role.SPARE


def standings(*each: tuple[Role, int, str]) -> list[Standing]:
    """Return standings of processes: role, number and host."""
    return [Standing(role, number, ord(host), 0) for role, number, host in each]


@pytest.mark.parametrize(
    ("processes", "target", "chosen"),
    [
        pytest.param([(A, 0, "a"), (A, 1, "a")], 2, [0, 1], id="nothing is lost"),
        pytest.param([(A, 0, "a"), (A, 2, "a"), (S, 2, "a")], 3, [0, 2, 1], id="a spare takes the number of the lost"),
        pytest.param([(A, 1, "a"), (A, 2, "a"), (S, 2, "a")], 3, [0, 2, 1], id="a spare is never the chief"),
        pytest.param([(A, 0, "a"), (A, 2, "a")], 3, [0, 1], id="no spare is left"),
        pytest.param([(A, 0, "a"), (S, 1, "a"), (S, 1, "b")], 2, [0, 2], id="the other host first"),
        pytest.param([(A, 0, "a"), (A, 1, "b"), (S, 1, "b"), (S, 1, "a")], 3, [0, 1, 2], id="hosts with equal numbers"),
        pytest.param([(A, 0, "a"), (A, 1, "a"), (A, 2, "a")], 2, [0, 1], id="fewer are wanted"),
        pytest.param([(A, 0, "a"), (A, 1, "a"), (S, 1, "a"), (S, 1, "a")], 4, [0, 1, 2, 3], id="more are wanted"),
        pytest.param([(L, 0, "a"), (A, 1, "a"), (S, 1, "a")], 2, [1, 2], id="one has finished"),
        pytest.param([(S, 1, "a"), (S, 1, "a")], 2, [], id="nobody has the variables"),
        pytest.param([(L, 0, "a"), (S, 1, "a")], 2, [], id="all have finished"),
    ],
)
def test_active_instances_stay_and_spares_join(
    processes: list[tuple[Role, int, str]], target: int, chosen: list[int]
) -> None:
    assert choose(standings(*processes), target) == chosen


def test_a_host_that_is_left_carries_no_active_instance() -> None:
    left = [Standing(A, 0, 1, 0, may_be_active=False), Standing(A, 1, 2, 0), Standing(S, 1, 1, 0, may_be_active=False)]
    assert choose(left, 2) == [1]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_choice_is_of_different_processes_and_as_large_as_possible(count: int) -> None:
    for roles in itertools.product((A, L, S), repeat=count):
        numbers = itertools.count()
        processes = [Standing(role, next(numbers) if role is A else 0, rank % 2, 0) for rank, role in enumerate(roles)]
        for target in range(1, count + 1):
            chosen = choose(processes, target)
            assert len(chosen) == len(set(chosen))
            assert all(roles[rank] is not L for rank in chosen)
            assert len(chosen) == (min(target, roles.count(A) + roles.count(S)) if A in roles else 0)
            assert not chosen or roles[chosen[0]] is A


def fed_over_threads(sent: list[list[bytes]], known: int = 0) -> tuple[list[bytes], bool]:
    """Return what rank 1 has got of the pieces that rank 0 has passed on, and whether it knows of the end."""
    hub = ThreadHub(2)
    journal = KeptJournal()
    feeder, spare = (collectives.load_backend("thread").ThreadLink(hub, rank, 2) for rank in (0, 1))
    got = KeptJournal()
    for entry in [entry for entries in sent for entry in entries][:known]:
        got.entries.append(entry)
    feeding, fed = Feeding(feeder, {1: known}), Fed(spare, 0)
    for entries in sent:
        for entry in entries:
            journal.add(lambda entry=entry: entry)
        feeding.pass_on(journal)
    feeding.end(journal)
    while fed.take(got):
        pass
    return got.entries.since(0), fed.is_end


@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_spare_gets_every_entry_once_and_the_end(known: int) -> None:
    sent = [[b"first", b""], [], [b"third"], [bytes(range(256)) * 300, b"last"]]
    assert fed_over_threads(sent, known) == ([entry for entries in sent for entry in entries], True)


def take_all(fed: Fed, journal: KeptJournal) -> None:
    while fed.take(journal):
        pass


def header(number: int, nbytes: int) -> np.ndarray:
    return np.array([number, nbytes], np.int64).view(np.uint8)


def damaged(number: int, body: bytes) -> list[np.ndarray]:
    return [header(number, len(body)), np.frombuffer(body, np.uint8)]


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([np.zeros(3, np.uint8)], "a message has 3 bytes in place of 16"),
        ([header(-2, 0)], "it announces -2 entries of 0 bytes"),
        ([header(1, -1)], "it announces 1 entries of -1 bytes"),
        ([header(HUGE, HUGE), np.zeros(7, np.uint8)], "a message has 7 bytes in place of"),
        (damaged(1, b"short"), "part 0 ends at byte"),
        (damaged(1, HUGE.to_bytes(8, "little") + b"entry"), f"part 0 ends at byte {HUGE + 8} of 13"),
        (damaged(2, joined([b"only one"])), "1 entries have come in place of 2"),
        (damaged(HUGE, joined([b"one", b"other"])), f"2 entries have come in place of {HUGE}"),
    ],
)
def test_a_damaged_journal_is_refused_and_takes_no_memory(messages: list[np.ndarray], why: str) -> None:
    hub, journal = ThreadHub(2), KeptJournal()
    feeder, spare = (collectives.load_backend("thread").ThreadLink(hub, rank, 2) for rank in (0, 1))
    fed = Fed(spare, 0)
    for message in messages:
        feeder.send(message, 1, 0)
    tracemalloc.start()
    with pytest.raises(BrokenError, match=f"rank 0 passes on is damaged: {why}"):
        take_all(fed, journal)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * spare.sizes.chunk_bytes
    assert len(journal) == 0


def test_a_long_journal_is_compressed_and_read_in_any_order() -> None:
    entries = Entries()
    expected = [b"step %d of a training, with its loss" % number for number in range(5 * BLOCK + 3)]
    for number, entry in enumerate(expected):
        assert len(entries) == number
        entries.append(entry)
    assert entries.since(0) == expected
    assert entries.since(3 * BLOCK - 1) == expected[3 * BLOCK - 1 :]
    assert entries.since(len(expected)) == []
    assert [entries[number] for number in (1000, 0, BLOCK, 5 * BLOCK)] == [
        expected[number] for number in (1000, 0, BLOCK, 5 * BLOCK)
    ]
    assert sum(map(len, entries._full)) < sum(map(len, expected)) / 5


def test_a_long_journal_passes_through_the_messages_of_grpc() -> None:
    """gRPC takes messages of at most 2 MiB; a worker that joins late gets all entries at once."""
    expected = [b"first", bytes(range(256)) * 20_000, b"", *(b"%060d" % number for number in range(2 * BLOCK))]
    journal, got = KeptJournal(), KeptJournal()
    for entry in expected:
        journal.add(lambda entry=entry: entry)
    with socket_addresses(2) as addresses:
        group = WorkerThreads(addresses)
        feeder, spare = [each.result(60) for each in [group.join(rank) for rank in range(2)]]
        assert feeder.beside is not None
        assert spare.beside is not None
        feeding, fed = Feeding(feeder.beside, {1: 0}), Fed(spare.beside, 0)
        feeding.pass_on(journal)
        feeding.end(journal)
        while not (fed.is_end or feeder.link.node.losses):
            if not fed.take(got):
                spare.beside.pause(1.0)
        for each in (feeder, spare):
            each.abandon()
    assert got.entries.since(0) == expected


def test_entries_are_encoded_in_their_order_and_once() -> None:
    journal, asked = KeptJournal(), []

    def entry(number: int) -> bytes:
        asked.append(number)
        return bytes([number])

    for number in range(5):
        journal.add(lambda number=number: entry(number))
        assert len(journal) == number + 1
    journal.encode()
    journal.encode()
    assert asked == list(range(5))
    assert journal.entries.since(0) == [bytes([number]) for number in range(5)]


def test_the_other_spares_are_fed_although_one_is_lost() -> None:
    hub, journal, got = ThreadHub(3), KeptJournal(), KeptJournal()

    def lose(source: int, to: int) -> None:
        if to == 1:
            raise PeerLostError("rank 1 is lost")

    hub.before_send = lose
    feeder, _, spare = (collectives.load_backend("thread").ThreadLink(hub, rank, 3) for rank in range(3))
    feeding, fed = Feeding(feeder, {1: 0, 2: 0}), Fed(spare, 0)
    journal.add(lambda: b"entry")
    feeding.pass_on(journal)
    feeding.end(journal)
    while fed.take(got):
        pass
    assert (got.entries.since(0), fed.is_end) == ([b"entry"], True)


def test_a_communicator_has_a_link_beside_its_collectives() -> None:
    def program(communicator: collectives.Communicator) -> bytes:
        import numpy as np

        assert communicator.beside is not None
        room = np.zeros(5, np.uint8)
        if communicator.rank == 0:
            communicator.beside.send(np.frombuffer(b"hello", np.uint8), 1, 0)
        communicator.barrier()
        if communicator.rank == 1:
            assert communicator.beside.receive(room, 0, 0).done()
        communicator.barrier()
        return room.tobytes()

    for mechanism in ("ring", "window"):
        assert collectives.run_on_threads(2, program, Settings(mechanism=mechanism))[1] == b"hello"


def test_a_spare_takes_part_in_no_collective_of_the_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "role", Role.SPARE)
    with pytest.raises(LifeCycleError, match="is a spare, which takes part in no collective"):
        popdist.allreduce([1])
    with pytest.raises(LifeCycleError, match="is a spare"):
        popdist.communicator()


def test_a_second_transport_is_refused_in_a_job_with_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "journal", KeptJournal())
    monkeypatch.setattr(process, "communicator", collectives.connect("single", Settings()))
    monkeypatch.setattr(process, "instance", Instance(0, 1, 1, 0, 1, 0))
    with pytest.raises(LifeCycleError, match="start the job without --spares"):
        join_besides(lambda settings, instance: collectives.connect("single", settings))
