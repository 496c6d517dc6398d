"""Called and started collectives: equal results, and equal messages of refusal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import collectives
from collectives import ClosedError, Communicator, Settings, UnsupportedBufferError, run_on_threads

Collective = Callable[..., object]

RUN = {
    "all_reduce": lambda on, name: on.all_reduce(contribution(on), "mean", name=name),
    "ordered_all_reduce": lambda on, name: on.ordered_all_reduce(
        [contribution(on), 3 * contribution(on)], np.empty(6, np.float32), "mean", name=name
    ),
    "ordered_all_reduce into shared memory": lambda on, name: on.ordered_all_reduce(
        [np.repeat(contribution(on), 999)], on.allocate([5994], np.float32), "mean", name=name
    ).copy(),
    "broadcast": lambda on, name: on.broadcast(contribution(on), 1, name=name),
    "all_gather": lambda on, name: on.all_gather(contribution(on), name=name),
    "reduce_scatter": lambda on, name: on.reduce_scatter(contribution(on), op="min", name=name),
}


def contribution(communicator: Communicator) -> np.ndarray:
    return np.array([0.1, 1e8, 3, -1e8, 0.7, 1 / 3], np.float32) / (communicator.rank + 1)


class Started:
    """The collectives of a communicator, each of them started and waited for."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self.allocate = communicator.allocate
        self._communicator = communicator

    def __getattr__(self, name: str) -> Collective:
        start = getattr(self._communicator, f"start_{name}")
        return lambda *args, **kwargs: start(*args, **kwargs).wait()


@pytest.mark.parametrize("collective", sorted(RUN))
@pytest.mark.parametrize("mechanism", ["ring", "window"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_started_collective_has_the_bits_of_a_called_one(collective: str, mechanism: str, size: int) -> None:
    def program(communicator: Communicator) -> bool:
        called = RUN[collective](communicator, "called")
        started = RUN[collective](Started(communicator), "started")
        return called.shape == started.shape and called.tobytes() == started.tobytes()

    assert run_on_threads(size, program, Settings(mechanism=mechanism)) == [True] * size


REFUSED = {
    "no array": lambda on: on.all_reduce([1.0], name="x"),
    "no dtype that can be added": lambda on: on.all_reduce(np.array([True]), name="x"),
    "an operation that there is not": lambda on: on.all_reduce(np.ones(2), "product", name="x"),
    "memory that is not contiguous": lambda on: on.broadcast(np.ones((4, 2))[:, 0], name="x"),
    "memory that cannot be written": lambda on: on.all_reduce(np.broadcast_to(np.ones(1), 1), name="x"),
    "a root that there is not": lambda on: on.broadcast(np.ones(2), 2, name="x"),
    "a root that is no number": lambda on: on.broadcast(np.ones(2), "first", name="x"),
    "an out of another shape": lambda on: on.all_gather(np.ones(2), np.ones((9, 9)), name="x"),
    "an out that overlaps in part": lambda on: on.ordered_all_reduce([(a := np.ones(8))[:6]], a[2:], name="x"),
    "contributions that differ": lambda on: on.ordered_all_reduce([np.ones(2), np.ones(3)], np.ones(2), name="x"),
    "an axis that cannot be divided": lambda on: on.reduce_scatter(np.ones(()), name="x"),
}


@pytest.mark.parametrize("buffers", sorted(REFUSED))
def test_a_started_collective_is_refused_in_the_same_words_as_a_called_one(buffers: str) -> None:
    texts = []
    with collectives.connect("single") as communicator:
        for on in (communicator, Started(communicator)):
            with pytest.raises((ValueError, TypeError)) as caught:
                REFUSED[buffers](on)
            texts.append((type(caught.value), str(caught.value)))
    assert texts[0] == texts[1]


def test_missing_contributions_are_refused_as_called_or_started() -> None:
    with collectives.connect("single") as communicator:
        with pytest.raises(ValueError, match="^ordered_all_reduce was called without contributions; give one array"):
            communicator.ordered_all_reduce([], np.ones(2))
        with pytest.raises(ValueError, match="^ordered_all_reduce was started without contributions; give one array"):
            communicator.start_ordered_all_reduce([], np.ones(2), name="x")


def test_buffers_are_checked_before_the_state_of_the_communicator() -> None:
    """A program with wrong buffers is told about them, and not about the communicator."""
    communicator = collectives.connect("single")
    communicator.close()
    for on in (communicator, Started(communicator)):
        with pytest.raises(UnsupportedBufferError, match="takes NumPy arrays, not list"):
            on.all_reduce([1.0], name="x")
        with pytest.raises(ClosedError, match="has been closed"):
            on.all_reduce(np.ones(2), name="x")
    with pytest.raises(ValueError, match="all_reduce was started without a name"):
        communicator.start_all_reduce(np.ones(2), name="")
