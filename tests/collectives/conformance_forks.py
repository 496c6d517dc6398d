"""Statements about forked children of a rank: every communicator refuses their calls, and its ranks go on."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from reference import LARGE
from statements import Suite

import collectives
from collectives import Communicator, ForkedProcessError
from collectives.collective_ops import SHARED_BYTES

suite = Suite()

SIZES = (7, 70_001, LARGE)
REPEATS = 3  # more than the calls after which repetitions are prepared


def end_of_child(act: Callable[[], object]) -> int:
    """Return the status of a forked child that calls `act`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and JAX say that threads and forks are dangerous together
        child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@suite.add
def a_forked_child_is_refused_by_name_and_disturbs_nobody(communicator: Communicator) -> None:
    shared = communicator.allocate((SHARED_BYTES,), "float32")
    group = communicator.subgroup(range(communicator.size))
    reduce_all(communicator, shared)
    begun = communicator.start_all_reduce(np.ones(1), name="begun before") if communicator.rank == 0 else None
    if begun is not None:
        calls = {**calls_of(communicator, shared), "in a group": group.barrier, "begun before": begun.wait}

        def act() -> None:
            expect_refusals(calls)
            shared[:] = -1  # without a call: the child's memory is its own
            assert (communicator.rank, communicator.is_inherited) == (0, True)
            for each in (group, communicator):
                each.close()
                each.abandon()
            with collectives.connect("single") as own:
                assert own.all_reduce(np.ones(1)) == 1
            assert end_of_child(lambda: expect_refusals(calls)) == 0  # a child of the child

        assert end_of_child(act) == 0
    group.barrier()  # the child has written into nothing that ranks share
    assert (shared == communicator.size).all()
    begun = begun or communicator.start_all_reduce(np.ones(1), name="begun before")
    assert begun.wait() == communicator.size
    reduce_all(communicator, shared)
    group.close()
    assert not communicator.is_inherited


def reduce_all(communicator: Communicator, shared: np.ndarray) -> None:
    """Check reductions that are repeated, so that some are prepared."""
    total = communicator.size
    for _ in range(REPEATS):
        for size in SIZES:
            assert (communicator.all_reduce(np.ones(size, np.float32), name="in place") == total).all()
            out = np.empty(size, np.float32)
            assert (communicator.ordered_all_reduce([np.ones(size, np.float32)], out, name="ordered") == total).all()
        communicator.ordered_all_reduce([np.ones(SHARED_BYTES, np.float32)], shared, name="shared")
        communicator.grouped_ordered_all_reduce(*group_of(1), names=["a", "b"])
    assert (shared == total).all()


def group_of(value: float) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    return [[np.full(9, float(value))] for _ in range(2)], [np.empty(9) for _ in range(2)]


def calls_of(communicator: Communicator, shared: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return the calls of a child, some of them prepared, with values that would show in the sums of the parent."""
    wrong = np.full(SIZES[0] * communicator.size, 1000, np.float32)
    calls: dict[str, Callable[[], object]] = {}
    for size in SIZES:
        array = np.full(size, 1000, np.float32)
        calls[f"all_reduce of {size}"] = partial(communicator.all_reduce, array, name="in place")
        out = np.empty_like(array)
        calls[f"ordered_all_reduce of {size}"] = partial(communicator.ordered_all_reduce, [array], out, name="ordered")
    if communicator.part is not None:
        calls["part"] = partial(make_part, communicator)
    if communicator.beside is not None:
        calls["send"] = partial(send_and_receive, communicator)
    return calls | {
        "shared": lambda: communicator.ordered_all_reduce([shared + 1000], shared, name="shared"),
        "grouped": lambda: communicator.grouped_ordered_all_reduce(*group_of(1000), names=["a", "b"]),
        "new": lambda: communicator.ordered_all_reduce([wrong]),
        "broadcast": lambda: communicator.broadcast(wrong),
        "all_gather": lambda: communicator.all_gather(wrong),
        "gather": lambda: communicator.gather(wrong),
        "shift": lambda: communicator.shift(wrong, distance=0),
        "reduce_scatter": lambda: communicator.reduce_scatter(wrong),
        "ordered_reduce_scatter": lambda: communicator.ordered_reduce_scatter([wrong]),
        "barrier": communicator.barrier,
        "allocate": lambda: communicator.allocate((3,), "float32"),
        "start": lambda: communicator.start_all_reduce(wrong, name="begun in a child"),
        "subgroup": lambda: communicator.subgroup([0]),
    }


def make_part(communicator: Communicator) -> None:
    assert communicator.part is not None
    communicator.part([0])


def send_and_receive(communicator: Communicator) -> None:
    link, message = communicator.beside, np.ones(3, np.uint8)
    assert link is not None
    expect_refusals({"receive": lambda: link.receive(message, communicator.size - 1, 0)})
    link.send(message, communicator.size - 1, 0)


def expect_refusals(calls: dict[str, Callable[[], object]]) -> None:
    """Check that each call raises the error of forked children."""
    for name, call in calls.items():
        with pytest.raises(ForkedProcessError, match="a child that was forked from"):
            raise AssertionError(f"{name} was not refused: {call()}")
