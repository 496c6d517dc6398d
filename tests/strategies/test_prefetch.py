"""Prefetch thread: order, bound, errors, and its end with its consumer."""

import gc
import logging
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import prefetched

LIMIT_S = 60


@pytest.fixture
def no_new_threads():
    """Wait until no prefetching thread runs that did not run at the beginning of the test."""
    before = set(threading.enumerate())

    def check():
        for thread in threading.enumerate():
            if thread.name == "dataset-prefetch" and thread not in before:
                thread.join(LIMIT_S)
                assert not thread.is_alive()

    return check


def numbers(stop, record=None):
    for k in range(stop):
        if record is not None:
            record.append(k)
        yield k


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
@pytest.mark.parametrize("length", [0, 1, 7, 100])
def test_items_come_in_order(depth, length, no_new_threads):
    assert list(prefetched(numbers(length), depth)) == list(range(length))
    no_new_threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_depth_items_are_prepared_ahead(depth):
    made, asked = threading.Semaphore(0), 0

    def counted():
        for k in range(20):
            assert k < asked + depth
            made.release()
            yield k

    items = prefetched(counted(), depth)
    for number in range(20 - depth):
        asked += 1
        assert next(items) == number
        for _ in range(1 + depth if number == 0 else 1):  # the expected number
            assert made.acquire(timeout=LIMIT_S)
    items.close()


def test_no_item_is_prepared_ahead_at_depth_zero_or_before_the_first_item():
    record = []
    items = prefetched(numbers(5, record), 0)
    assert next(items) == 0
    assert record == [0]
    lazy = []
    prefetched(numbers(5, lazy), 3)
    assert lazy == []


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_error_comes_after_the_items_before_it(depth, no_new_threads):
    def failing():
        yield 1
        yield 2
        raise KeyError("broken source")

    items = prefetched(failing(), depth)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="broken source") as caught:
        next(items)
    assert caught.traceback[-1].name == "failing"
    no_new_threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_while_closing_the_source_is_not_swallowed(depth):
    def failing():
        try:
            yield 1
        finally:
            raise KeyError("broken close")

    with pytest.raises(KeyError, match="broken close"):
        list(prefetched(failing(), depth))


@pytest.mark.parametrize("depth", [0, 2])
def test_abandoning_the_items_closes_the_source(depth, no_new_threads):
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    for _ in prefetched(endless(), depth):
        break
    assert closed.wait(LIMIT_S)
    no_new_threads()


def test_items_in_a_cycle_are_collected_with_their_thread(no_new_threads):
    class Holder:
        pass

    holder = Holder()
    holder.itself = holder
    holder.items = prefetched(numbers(1000), 2)
    next(holder.items)
    del holder
    gc.collect()
    no_new_threads()


def test_a_slow_source_is_reported(monkeypatch):
    monkeypatch.setattr("strategies.data.iterators.SLOW_WARNING_S", 0.01)
    reported = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: reported.set()
    logger = logging.getLogger("strategies.data.iterators")
    logger.addHandler(handler)

    def slow():
        assert reported.wait(LIMIT_S)
        yield 1

    assert list(prefetched(slow(), 1)) == [1]
    logger.removeHandler(handler)


def test_leaving_a_loop_leaves_no_thread(no_new_threads):
    dataset = DistributedDataset(np.arange(400), batch_size=4, total_replicas=1, local_replicas=range(1))
    for _ in dataset.epoch(0):
        break
    no_new_threads()
    with suppress(KeyError):
        for _ in dataset.epoch(0):
            raise KeyError
    no_new_threads()
    abandoned = dataset.epoch(1)
    next(abandoned)
    del abandoned
    gc.collect()
    no_new_threads()


@pytest.mark.complete
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_the_interpreter_exits_while_items_are_left(end):
    program = f"""
import itertools, numpy
from strategies.data.iterators import prefetched
items = prefetched((numpy.zeros(10) for _ in itertools.count()), 2)
next(items)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == (3 if end else 0), done.stderr
    assert "Traceback" not in done.stderr
