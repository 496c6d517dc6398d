"""Messages between the ranks of a host through shared memory."""

from __future__ import annotations

import random
import threading
import weakref

import numpy as np
import pytest

from collectives.backends.thread import ThreadHub, ThreadLink
from collectives.hosts.hosts_link import HostsLink
from collectives.hosts.near import CAN_RING, FRAGMENT_BYTES, POOL_BYTES, QUEUED, NearLink, memory_bytes
from collectives.point_to_point.link import EXCHANGE, LANES, PARTIALS, RESULTS, Link, Pause


def links(size: int) -> list[NearLink]:
    memory = memoryview(bytearray(memory_bytes(size)))
    return [NearLink(memory, rank, size) for rank in range(size)]


def message(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def pause_of(link: NearLink) -> Pause:
    assert link.pause is not None
    return link.pause


@pytest.mark.parametrize("nbytes", [0, 1, 64, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 3 * POOL_BYTES[EXCHANGE] + 5])
@pytest.mark.parametrize("lane", range(LANES))
def test_a_message_of_any_length_arrives_unchanged(lane: int, nbytes: int) -> None:
    one, other = links(2)
    sent_data, into = message(nbytes), np.zeros(nbytes + 3, np.uint8)
    sent, received = one.send(sent_data, 1, lane), other.receive(into, 0, lane)
    while not received.done():
        sent.done()
    assert sent.done()
    assert received.received == nbytes
    assert (into[:nbytes] == sent_data).all()
    assert not into[nbytes:].any()


def test_sent_data_may_be_overwritten_when_the_transfer_is_done() -> None:
    one, other = links(2)
    data, into = message(100), np.empty(100, np.uint8)
    before = data.copy()
    assert one.send(data, 1, PARTIALS).done()
    data[:] = 0
    assert other.receive(into, 0, PARTIALS).done()
    assert (into == before).all()


def test_a_sender_without_room_waits_and_does_not_block_other_lanes() -> None:
    one, other = links(2)
    many = [one.send(message(1), 1, PARTIALS) for _ in range(QUEUED + 1)]
    assert [each.done() for each in many] == [True] * QUEUED + [False]
    assert one.send(message(1), 1, RESULTS).done()
    other.receive(np.empty(1, np.uint8), 0, PARTIALS).done()
    assert many[-1].done()


def test_an_unclaimed_message_blocks_no_other_message() -> None:
    """Rank 1 first asks for the message of rank 2, which is queued behind one for rank 0."""
    first, second, third = links(3)
    nbytes = 2 * POOL_BYTES[PARTIALS]
    to_first, to_second = third.send(message(nbytes), 0, PARTIALS), third.send(message(nbytes), 1, PARTIALS)
    from_second = second.send(message(nbytes), 0, PARTIALS)
    at_first = [first.receive(np.empty(nbytes, np.uint8), source, PARTIALS) for source in (1, 2)]
    at_second = second.receive(np.empty(nbytes, np.uint8), 2, PARTIALS)
    for _ in range(200):
        at_first[0].done()
        at_second.done()
        for sent in (from_second, to_second, to_first):
            sent.done()
    assert all(each.done() for each in (*at_first, at_second))


def test_a_message_for_several_receivers_is_stored_once() -> None:
    ranks = links(5)
    data = message(POOL_BYTES[RESULTS] // 8)
    for _ in range(6):  # 24 copies would not fit
        assert all(each.done() for each in ranks[0].send_all(data, [1, 2, 3, 4], RESULTS))
    for link in ranks[1:]:
        for _ in range(6):
            into = np.empty_like(data)
            assert link.receive(into, 0, RESULTS).done()
            assert (into == data).all()


def test_messages_keep_their_order_in_random_schedules(seed: int) -> None:
    drawn = random.Random(seed)
    ranks = links(3)
    lengths = [0, 1, 100, FRAGMENT_BYTES - 1, FRAGMENT_BYTES + 7, POOL_BYTES[EXCHANGE] + 1]
    ways = [(source, to, lane) for source in range(3) for to in range(3) for lane in range(LANES) if source != to]
    acts = [(is_sent, *way) for is_sent in (True, False) for way in ways for _ in range(12)]
    drawn.shuffle(acts)
    sent: dict[tuple[int, int, int], list[np.ndarray]] = {way: [] for way in ways}
    come: dict[tuple[int, int, int], list[np.ndarray]] = {way: [] for way in ways}
    under_way = []
    for number, (is_sent, source, to, lane) in enumerate(acts):
        if is_sent:
            sent[source, to, lane].append(message(drawn.choice(lengths), number))
            under_way.append(ranks[source].send(sent[source, to, lane][-1], to, lane))
        else:
            come[source, to, lane].append(np.zeros(max(lengths), np.uint8))
            under_way.append(ranks[to].receive(come[source, to, lane][-1], source, lane))
        drawn.choice(under_way).done()
    while under_way:
        under_way = [each for each in under_way if not each.done()]
    for way in ways:
        for data, into in zip(sent[way], come[way], strict=True):
            assert (into[: data.size] == data).all()
            assert not into[data.size :].any()


@pytest.mark.skipif(not CAN_RING, reason="this machine has no futexes that we know")
@pytest.mark.timeout(60)
def test_a_message_ends_the_wait_of_its_receiver() -> None:
    """The message may come before the wait begins."""
    one, other = links(2)
    for _ in range(2):
        received = other.receive(np.empty(1, np.uint8), 0, EXCHANGE)
        thread = threading.Thread(target=one.send, args=(message(1), 1, EXCHANGE))
        thread.start()
        while not received.done():
            pause_of(other)(600)
        thread.join()


@pytest.mark.skipif(not CAN_RING, reason="this machine has no futexes that we know")
@pytest.mark.timeout(60)
def test_room_for_the_next_fragment_ends_the_wait_of_the_sender() -> None:
    one, other = links(2)
    nbytes = 3 * POOL_BYTES[PARTIALS]
    received = other.receive(np.empty(nbytes, np.uint8), 0, PARTIALS)

    def take() -> None:
        while not received.done():
            pause_of(other)(600)

    thread = threading.Thread(target=take)
    thread.start()
    sent = one.send(message(nbytes), 1, PARTIALS)
    while not sent.done():
        pause_of(one)(600)
    thread.join()
    assert received.received == nbytes


def test_a_wait_sleeps_only_if_no_transfer_over_the_network_is_in_progress() -> None:
    hub = ThreadHub(3)
    far = [ThreadLink(hub, rank, 0) for rank in range(3)]
    for link in far:
        link.hosts = (0, 0, 1)
    near = links(2)
    link = HostsLink(far[0], near[0])
    assert link.pausing() == near[0].pause
    received = link.receive(np.empty(1, np.uint8), 2, RESULTS)
    assert link.pausing() is None
    far[2].send(message(1), 0, RESULTS)
    assert link.pausing() == near[0].pause
    assert received.done()


class Begun:
    """A transfer that counts the queries of its state."""

    received = None

    def __init__(self, is_done: bool) -> None:
        self.asked = 0
        self._is_done = is_done

    def done(self) -> bool:
        self.asked += 1
        return self._is_done


class Far(Link):
    """A link that connects ranks 0 and 1 of one host with rank 2 of another one, and moves nothing."""

    hosts = (0, 0, 1)

    def __init__(self, ends_at_once: bool) -> None:
        self.rank, self.size = 0, 3
        self._ends_at_once = ends_at_once
        self.begun: weakref.WeakSet[Begun] = weakref.WeakSet()

    def send(self, data: np.ndarray, to: int, lane: int) -> Begun:
        begun = Begun(self._ends_at_once)
        self.begun.add(begun)
        return begun

    def receive(self, into: np.ndarray, source: int, lane: int) -> Begun:
        return self.send(into, source, lane)


def test_new_messages_begin_without_queries_of_transfers_in_progress() -> None:
    far = Far(ends_at_once=False)
    link = HostsLink(far, links(2)[0])
    held = [link.send(message(1), 2, lane) for lane in (PARTIALS, RESULTS) for _ in range(20)]
    assert link.pausing() is None
    assert [each.asked for each in far.begun if each is not held[0]] == [0] * 39


def test_finished_transfers_are_forgotten_even_if_nobody_waits() -> None:
    far = Far(ends_at_once=True)
    link = HostsLink(far, links(2)[0])
    for _ in range(2000):
        link.send(message(1), 2, PARTIALS)
    assert len(far.begun) < 1000
