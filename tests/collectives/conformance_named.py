"""Statements about every communicator that starts collectives by name and waits for them later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reference import LARGE, Reduced, contributions
from statements import (
    About,
    Suite,
    assert_equal_on_all_ranks,
    assert_reduced,
    assert_same_bits,
    texts_of_all_ranks,
    twin_of,
)

from collectives import Communicator, Handle, LayoutMismatchError

suite = Suite()

LENGTHS = (0, 7, 3001, 70_001)


class Started:
    """A collective in progress, and its expected result."""

    def __init__(self, communicator: Communicator, handle: Handle, expected: np.ndarray | Reduced) -> None:
        self.communicator = communicator
        self.handle = handle
        self.expected = expected

    def check(self) -> None:
        result = self.handle.wait()
        if isinstance(self.expected, Reduced):
            assert_reduced(self.communicator, result, self.expected, self.handle.call)
        else:
            assert_same_bits(result, self.expected, self.handle.call)
        assert self.handle.done()


Start = Callable[[Communicator, str, int], Started]


def _arrays(c: Communicator, length: int) -> list[np.ndarray]:
    return contributions("float32", length, range(c.size))


def start_all_reduce(c: Communicator, name: str, length: int) -> Started:
    arrays = _arrays(c, length)
    return Started(c, c.start_all_reduce(arrays[c.rank].copy(), name=name), Reduced(arrays, "sum"))


def start_maximum(c: Communicator, name: str, length: int) -> Started:
    arrays = _arrays(c, length)
    return Started(c, c.start_all_reduce(arrays[c.rank].copy(), "max", name=name), Reduced(arrays, "max"))


def start_ordered(c: Communicator, name: str, length: int) -> Started:
    replicas = contributions("float16", length, range(2 * c.size))
    out = np.empty(length, np.float16)
    mine = replicas[2 * c.rank : 2 * c.rank + 2]
    return Started(c, c.start_ordered_all_reduce(mine, out, "mean", name=name), Reduced(replicas, "mean"))


def start_broadcast(c: Communicator, name: str, length: int) -> Started:
    arrays, root = _arrays(c, length), c.size - 1
    return Started(c, c.start_broadcast(arrays[c.rank].copy(), root, name=name), arrays[root])


def start_all_gather(c: Communicator, name: str, length: int) -> Started:
    arrays = _arrays(c, length)
    return Started(c, c.start_all_gather(arrays[c.rank], name=name), np.stack(arrays))


def start_reduce_scatter(c: Communicator, name: str, length: int) -> Started:
    arrays = _arrays(c, length)
    wide = [np.tile(array, c.size) for array in arrays]
    return Started(c, c.start_reduce_scatter(wide[c.rank], name=name), Reduced(arrays, "sum"))


STARTS: tuple[Start, ...] = (
    start_all_reduce,
    start_maximum,
    start_ordered,
    start_broadcast,
    start_all_gather,
    start_reduce_scatter,
)


def _shuffled(items: list, seed: int) -> list:
    order = np.random.default_rng(seed).permutation(len(items))
    return [items[position] for position in order]


@suite.add_for_each(tuple(start.__name__ for start in STARTS))
def a_started_collective_ends_like_the_called_one(communicator: Communicator, kind: str) -> None:
    start = globals()[kind]
    for length in (*LENGTHS, LARGE):
        start(communicator, f"{kind} {length}", length).check()


@suite.add
def ranks_may_start_names_in_different_orders(communicator: Communicator) -> None:
    plans = [(start, f"{start.__name__} {length}", length) for start in STARTS for length in LENGTHS]
    started = [start(communicator, name, length) for start, name, length in _shuffled(plans, 1000 + communicator.rank)]
    for one in _shuffled(started, 2000 + communicator.rank):
        one.check()


@suite.add
def started_reductions_have_the_same_bits_on_all_ranks(communicator: Communicator) -> None:
    starts = {
        f"{start.__name__} {length}": (start, length)
        for start in (start_all_reduce, start_ordered)
        for length in LENGTHS
    }
    started = {}
    for name in _shuffled(list(starts), 3000 + communicator.rank):
        start, length = starts[name]
        started[name] = start(communicator, name, length)
    assert_equal_on_all_ranks(communicator, [started[name].handle.wait() for name in starts])


@suite.add
def threads_may_start_names_in_different_orders(communicator: Communicator) -> None:
    def start_all_then_wait(thread: int) -> None:
        plans = [(start, f"{thread} {start.__name__} {turn}") for turn in range(3) for start in STARTS]
        started = [start(communicator, name, 300) for start, name in _shuffled(plans, communicator.rank * 10 + thread)]
        for one in started:
            one.check()

    _in_threads(start_all_then_wait, range(4))


@suite.add
def threads_may_wait_for_one_name_after_another(communicator: Communicator) -> None:
    def wait_for_each(thread: int) -> None:
        for turn in range(10):
            start_all_reduce(communicator, f"{thread} {turn}", 300).check()

    _in_threads(wait_for_each, _shuffled([0, 1, 2], communicator.rank))


def _in_threads(function: Callable[[int], None], threads: Sequence[int]) -> None:
    with ThreadPoolExecutor(len(threads)) as pool:
        for future in [pool.submit(function, thread) for thread in threads]:
            future.result()


@suite.add
def many_collectives_may_be_in_progress_while_others_are_called(communicator: Communicator) -> None:
    names = [f"bucket {number}" for number in range(60)]
    started = [start_all_reduce(communicator, name, 100) for name in _shuffled(names, communicator.rank)]
    for turn in range(30):
        buffer = np.full((7, 70_001)[turn % 2], turn, np.int32)
        assert (communicator.all_reduce(buffer) == turn * communicator.size).all()
    for one in started:
        one.check()


@suite.add
def a_name_may_be_used_again_before_it_has_ended(communicator: Communicator) -> None:
    buffers = [np.full(50, turn + communicator.rank, np.int64) for turn in range(20)]
    handles = [communicator.start_all_reduce(buffer, "max", name="again") for buffer in buffers]
    for turn, handle in enumerate(handles):
        assert handle.wait() is buffers[turn]
        assert (buffers[turn] == turn + communicator.size - 1).all()


@suite.add
def a_result_may_be_waited_for_twice(communicator: Communicator) -> None:
    handle = communicator.start_all_gather(np.array(communicator.rank), name="twice")
    assert handle.wait() is handle.wait()


@suite.add
def closing_waits_for_started_collectives(communicator: Communicator) -> None:
    with twin_of(communicator) as group:
        names = _shuffled([f"left {number}" for number in range(20)], communicator.rank)
        started = [start_all_reduce(group, name, 5000) for name in names]
    assert all(one.handle.done() for one in started)
    for one in started:
        one.check()


@suite.add_for_groups
def different_layouts_under_one_name_fail_on_all_ranks(communicator: Communicator) -> None:
    last = communicator.size - 1
    is_last = communicator.rank == last
    pairs = (
        (np.ones(7, np.float32), np.ones(8, np.float32), ("float32[7]", "float32[8]")),
        (np.ones(7, np.float32), np.ones(7, np.int32), ("float32[7]", "int32[7]")),
        (np.ones(1, np.float32), np.ones(LARGE, np.float32), ("float32[1]", f"float32[{LARGE}]")),
    )
    for number, (usual, odd, words) in enumerate(pairs):
        buffer = odd.copy() if is_last else usual.copy()
        handle = communicator.start_all_reduce(buffer, name=f"weights {number}")
        fine = start_all_reduce(communicator, "fine", 70_001)
        with pytest.raises(LayoutMismatchError, match="Tensor layouts did not match on all instances") as caught:
            handle.wait()
        text = str(caught.value)
        assert texts_of_all_ranks(communicator, text) == [text] * communicator.size
        assert all(word in text for word in (*words, f"'weights {number}'", f"rank {last} called")), text
        assert_same_bits(buffer, odd if is_last else usual)
        fine.check()


@suite.add_for_groups
def different_operations_under_one_name_fail_on_all_ranks(communicator: Communicator) -> None:
    buffer = np.ones(7, np.float32)
    starts = (
        lambda: communicator.start_all_reduce(buffer, name="x"),
        lambda: communicator.start_all_gather(buffer, name="x"),
    )
    with pytest.raises(LayoutMismatchError, match="all_gather 'x'") as caught:
        starts[communicator.rank % 2]().wait()
    assert "all_reduce 'x'" in str(caught.value)
    start_all_reduce(communicator, "x", 30).check()


@suite.add_for_groups
def a_name_that_one_rank_never_starts_fails_when_that_rank_closes(communicator: Communicator) -> None:
    last = communicator.size - 1
    with twin_of(communicator) as group:
        start_all_reduce(group, "common", 7).check()
        if group.rank < last:
            buffer = np.ones(7, np.float32)
            handle = group.start_all_reduce(buffer, name="lonely")
            with pytest.raises(LayoutMismatchError, match=f"rank {last} called close") as caught:
                handle.wait()
            text = str(caught.value)
            assert "all_reduce 'lonely'" in text
            assert ("ranks" if last > 1 else "rank") + " 0" in text
            assert (buffer == 1).all()
    communicator.barrier()


@suite.add_about(About.ARGUMENTS)
def a_start_needs_a_name(communicator: Communicator) -> None:
    with pytest.raises(TypeError):
        communicator.start_all_reduce(np.ones(3))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="without a name"):
        communicator.start_all_reduce(np.ones(3), name="")
