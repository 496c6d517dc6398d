"""Arrays of several messages whose lengths no number of ranks divides, over the ring and the window."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
from adding import added

from collectives import Communicator, Settings, run_on_threads
from collectives.point_to_point.link import Sizes

RANKS = 3
LENGTH = Sizes().whole_bytes // 4 + 7  # elements of float32
MECHANISMS = pytest.mark.parametrize("mechanism", ["ring", "window"])


def contributions(replicas: int, length: int = LENGTH) -> list[np.ndarray]:
    rng = np.random.default_rng(replicas)
    return [rng.standard_normal(length, np.float32) for _ in range(replicas)]


def digest(array: np.ndarray) -> str:
    """Return a digest for comparison; pytest would need minutes to show the difference of long arrays."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def on_ranks(mechanism: str, program: Callable[[Communicator], np.ndarray]) -> list[str]:
    return [digest(result) for result in run_on_threads(RANKS, program, Settings(mechanism=mechanism))]


@MECHANISMS
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 2), (1, 3, 2)])
def test_every_rank_gets_the_ordered_mean(mechanism: str, counts: tuple[int, ...]) -> None:
    all_of_them = contributions(sum(counts))
    total = added(all_of_them)
    bounds = [0, *accumulate(counts)]

    def program(communicator: Communicator) -> np.ndarray:
        own = all_of_them[slice(*bounds[communicator.rank : communicator.rank + 2])]
        return communicator.ordered_all_reduce(own, np.full(LENGTH, np.nan, np.float32), "mean")

    assert on_ranks(mechanism, program) == [digest(total / np.float32(sum(counts)))] * RANKS


@MECHANISMS
@pytest.mark.parametrize("root", range(RANKS))
@pytest.mark.parametrize("length", [1, LENGTH])
def test_a_broadcast_gives_the_values_of_its_root(mechanism: str, root: int, length: int) -> None:
    all_of_them = contributions(RANKS, length)

    def program(communicator: Communicator) -> np.ndarray:
        return communicator.broadcast(all_of_them[communicator.rank].copy(), root)

    assert on_ranks(mechanism, program) == [digest(all_of_them[root])] * RANKS


@MECHANISMS
@pytest.mark.parametrize("length", [1, LENGTH])
def test_a_gather_keeps_the_order_of_the_ranks(mechanism: str, length: int) -> None:
    all_of_them = contributions(RANKS, length)
    gathered = on_ranks(mechanism, lambda communicator: communicator.all_gather(all_of_them[communicator.rank]))
    assert gathered == [digest(np.stack(all_of_them))] * RANKS
