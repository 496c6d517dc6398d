"""The detection of different calls by their fingerprints."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from collectives import Communicator, LayoutMismatchError, Settings, run_on_threads
from collectives.calls import MISMATCH, Call, checked_root, describe_mismatch
from collectives.instruments import Instruments

CALL = Call("ordered_all_reduce", "weights", "sum", "float32", (3, 4), -1)


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "all_reduce"},
        {"name": "weight"},
        {"name": ""},
        {"op": "mean"},
        {"dtype": "float16"},
        {"shape": (4, 3)},
        {"shape": (12,)},
        {"shape": ()},
        {"root": 0},
        {"into_shared": True},
        {"group": (CALL,)},
    ],
    ids=str,
)
def test_calls_with_one_difference_have_different_fingerprints(change: dict[str, object]) -> None:
    assert replace(CALL, **change).fingerprint != CALL.fingerprint


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert Call("barrier", "epoch").fingerprint == 313703245917863985


@pytest.mark.parametrize("mechanism", ["ring", "window"])
@pytest.mark.parametrize("length", [4, 100_000])
def test_different_calls_fail_before_data_mixes(mechanism: str, length: int) -> None:
    def program(communicator: Communicator) -> str:
        name = "weights" if communicator.rank else "biases"
        buffer = np.full(length, communicator.rank, np.float32)
        with pytest.raises(LayoutMismatchError) as caught:
            communicator.all_reduce(buffer, name=name)
        assert (buffer == communicator.rank).all()
        assert communicator.all_reduce(np.ones(length, np.float32), name="both")[-1] == 2
        return str(caught.value)

    first, second = run_on_threads(2, program, Settings(mechanism=mechanism))
    assert first == second
    assert f"rank 0 called all_reduce 'biases' (sum, float32[{length}])" in first
    assert f"rank 1 called all_reduce 'weights' (sum, float32[{length}])" in first


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("ab", "rank 0 called a; rank 1 called b"),
        ("aab", "ranks 0-1 called a; rank 2 called b"),
        ("abab", "ranks 0, 2 called a; ranks 1, 3 called b"),
        ("baaabba", "ranks 0, 4-5 called b; ranks 1-3, 6 called a"),
    ],
)
def test_a_mismatch_names_all_ranks_with_their_calls(calls: str, text: str) -> None:
    assert describe_mismatch(calls) == f"{MISMATCH}: {text}; make the same calls in the same order on every rank"


def test_the_message_names_closed_ranks_first() -> None:
    calls = ["close", "all_reduce", "close", "close"]
    assert describe_mismatch(calls) == (
        f"{MISMATCH}: ranks 0, 2-3 called close; rank 1 called all_reduce; "
        "see why ranks 0, 2-3 came to the end, or make the same calls in the same order on every rank"
    )


def test_an_error_holds_the_ranks_that_have_closed() -> None:
    def program(communicator):
        with pytest.raises(LayoutMismatchError) as caught:
            communicator.close() if communicator.rank == 1 else communicator.all_reduce(np.ones(3))
        communicator.abandon()  # the closed rank has ended already
        return caught.value.closed

    assert run_on_threads(3, program) == [(1,)] * 3


def test_a_supervisor_learns_which_rank_was_waited_for_in_vain() -> None:
    """Even a short wait is reported, because the supervisor then ends the ranks before they time out."""

    class Noted:
        def __init__(self) -> None:
            self.by_thread: dict[int, list[int]] = {}

        def waiting_for(self, instances: Sequence[int]) -> None:
            self.by_thread[threading.get_ident()] = list(instances)

    noted = Noted()

    def program(communicator):
        with pytest.raises(LayoutMismatchError):
            communicator.close() if communicator.rank == 1 else communicator.all_reduce(np.ones(3))
        communicator.abandon()
        return noted.by_thread.get(threading.get_ident()) if communicator.rank != 1 else "has left"

    assert run_on_threads(3, program, Settings(progress=Instruments(noted))) == [[1], "has left", [1]]


def test_an_error_of_a_named_call_holds_the_ranks_that_have_closed() -> None:
    def program(communicator):
        closed = (1,)
        if communicator.rank != 1:
            with pytest.raises(LayoutMismatchError) as caught:
                communicator.start_all_reduce(np.ones(3), name="late").wait()
            closed = caught.value.closed
        communicator.close()
        return closed

    assert run_on_threads(3, program) == [(1,)] * 3


@pytest.mark.parametrize("root", [0, 2, np.int64(1), True])
def test_a_valid_root_is_returned(root: object) -> None:
    assert checked_root("root_rank", root, 3, "ranks") == root


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_outside_of_the_ranks_is_refused(root: int) -> None:
    with pytest.raises(ValueError, match=rf"root_rank is {root}, but the ranks are 0 to 2; name one of them"):
        checked_root("root_rank", root, 3, "ranks")


@pytest.mark.parametrize("root", [1.0, "1", None])
def test_a_root_must_be_a_whole_number(root: object) -> None:
    with pytest.raises(TypeError, match="not a whole number; name one of the ranks 0 to 2"):
        checked_root("root_rank", root, 3, "ranks")
