"""Messages on a lane between two workers: how many are kept, and when data are copied."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives.network.lanes import HELD, SMALL_BYTES, Bell, Fetched, Inbox, Outbox, Received, Sent

FOREVER_S = 10_000.0  # far beyond the limit of a test


@pytest.fixture
def bell() -> Bell:
    return Bell()


def message(number: int, nbytes: int = 8) -> bytes:
    return bytes([number]) * nbytes


# ---- receiving


def test_messages_come_in_order_and_ring_the_bell(bell: Bell) -> None:
    inbox = Inbox(bell)
    assert inbox.take() is None
    for number in range(HELD):
        inbox.put(message(number))
    bell.wait(FOREVER_S)  # returns at once because it rings
    inbox.await_room()
    assert [inbox.take() for _ in range(HELD + 1)] == [*map(message, range(HELD)), None]


def test_a_full_inbox_has_no_room_until_a_message_is_taken(bell: Bell) -> None:
    inbox = Inbox(bell)
    for number in range(HELD + 1):
        inbox.put(message(number))
    began, ended = threading.Event(), threading.Event()

    def await_room() -> None:
        began.set()
        inbox.await_room()
        ended.set()

    thread = threading.Thread(target=await_room)
    thread.start()
    assert began.wait(60)
    assert not ended.is_set()
    assert inbox.take() == message(0)
    assert ended.wait(60)
    thread.join()
    assert [inbox.take() for _ in range(HELD + 1)] == [*map(message, range(1, HELD + 1)), None]


def test_a_closed_inbox_drops_messages_and_blocks_nobody(bell: Bell) -> None:
    inbox = Inbox(bell)
    for number in range(HELD):
        inbox.put(message(number))
    inbox.close()
    for number in range(3 * HELD):
        inbox.put(message(number))
        inbox.await_room()
    assert inbox.take() is None


def test_a_message_is_received_at_the_beginning_of_its_memory(bell: Bell) -> None:
    inbox, complaints = Inbox(bell), []
    into = np.zeros(10, np.uint8)
    received = Received(inbox, into, complaints.append)
    assert not received.done()
    inbox.put(message(7))
    assert received.done()
    assert received.done()
    assert received.received == 8
    assert into.tolist() == [7] * 8 + [0] * 2
    assert complaints == []


def test_a_message_longer_than_its_memory_is_reported_and_not_written(bell: Bell) -> None:
    inbox, complaints = Inbox(bell), []
    into = np.zeros(7, np.uint8)
    inbox.put(message(7))
    assert not Received(inbox, into, complaints.append).done()
    assert complaints == ["it sent 8 bytes, but 7 at most were expected"]
    assert not into.any()


def test_a_message_of_the_right_size_may_stay_in_place(bell: Bell) -> None:
    inbox, complaints = Inbox(bell), []
    fetched = Fetched(inbox, 8, 8, complaints.append)
    assert not fetched.done()
    inbox.put(message(7))
    assert fetched.done()
    assert fetched.message.tobytes() == message(7)
    assert complaints == []


@pytest.mark.parametrize("nbytes", [7, 9])
def test_a_message_of_a_wrong_size_is_reported(bell: Bell, nbytes: int) -> None:
    inbox, complaints = Inbox(bell), []
    inbox.put(message(7, nbytes))
    assert not Fetched(inbox, 8, 8, complaints.append).done()
    assert complaints == [f"it sent {nbytes} bytes, but 8 were expected"]


def test_a_message_that_may_be_shorter_has_a_limit(bell: Bell) -> None:
    inbox, complaints = Inbox(bell), []
    inbox.put(message(7, 5))
    inbox.put(message(8, 9))
    shorter, longer = (Fetched(inbox, 0, 8, complaints.append) for _ in range(2))
    assert shorter.done()
    assert shorter.received == 5
    assert not longer.done()
    assert complaints == ["it sent 9 bytes, but 8 at most were expected"]


def test_an_empty_message_arrives_once(bell: Bell) -> None:
    inbox = Inbox(bell)
    fetched = Fetched(inbox, 0, 0, pytest.fail)
    assert not fetched.done()
    inbox.put(b"")
    inbox.put(message(7))
    assert fetched.done()
    assert fetched.done()
    assert fetched.message.size == 0
    assert inbox.take() == message(7)


# ---- sending


def test_large_data_are_copied_only_when_the_network_takes_them() -> None:
    """Otherwise an array of many messages would be in memory twice."""
    data = np.full(SMALL_BYTES + 1, 1, np.uint8)
    sent = Sent(data)
    assert not sent.done()
    data[:] = 2
    assert sent.take() == message(2, SMALL_BYTES + 1)
    assert sent.done()


def test_the_network_takes_messages_in_order_until_the_end(bell: Bell) -> None:
    outbox = Outbox(bell)
    sent = Sent(np.full(SMALL_BYTES + 1, 1, np.uint8))
    for each in (message(0), sent, message(2)):
        outbox.put(each)
    outbox.end()
    taken = iter(outbox)
    assert next(taken) == message(0)
    assert not sent.done()
    assert next(taken) == message(1, SMALL_BYTES + 1)
    assert sent.done()
    bell.wait(FOREVER_S)
    assert list(taken) == [message(2)]
