"""How ranks notice that they do not call the same thing."""

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
def test_calls_that_differ_in_one_thing_have_different_fingerprints(change: dict[str, object]) -> None:
    assert replace(CALL, **change).fingerprint != CALL.fingerprint


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert Call("barrier", "epoch").fingerprint == 313703245917863985


@pytest.mark.parametrize("mechanism", ["ring", "window"])
@pytest.mark.parametrize("length", [4, 100_000])
def test_ranks_that_call_different_things_learn_it_before_data_mixes(mechanism: str, length: int) -> None:
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
def test_a_mismatch_names_all_ranks_with_what_they_called(calls: str, text: str) -> None:
    assert describe_mismatch(calls) == f"{MISMATCH}: {text}; make the same calls in the same order on every rank"


def test_who_has_come_to_the_end_is_to_be_looked_at_first() -> None:
    calls = ["close", "all_reduce", "close", "close"]
    assert describe_mismatch(calls) == (
        f"{MISMATCH}: ranks 0, 2-3 called close; rank 1 called all_reduce; "
        "see why ranks 0, 2-3 came to the end, or make the same calls in the same order on every rank"
    )


def test_who_has_come_to_the_end_is_known_without_reading_the_text() -> None:
    def program(communicator):
        with pytest.raises(LayoutMismatchError) as caught:
            communicator.close() if communicator.rank == 1 else communicator.all_reduce(np.ones(3))
        communicator.abandon()  # the one that closed has
        return caught.value.closed

    assert run_on_threads(3, program) == [(1,)] * 3


def test_whoever_supervises_the_others_learns_for_whom_they_have_waited_in_vain() -> None:
    """However short the wait was: the supervisor ends them then, and need not wait until they give up by themselves."""

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


def test_of_named_calls_too() -> None:
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
def test_a_root_is_one_of_the_members(root: object) -> None:
    assert checked_root("root_rank", root, 3, "ranks") == root


@pytest.mark.parametrize("root", [-1, 3])
def test_another_one_is_refused(root: int) -> None:
    with pytest.raises(ValueError, match=rf"root_rank is {root}, but the ranks are 0 to 2; name one of them"):
        checked_root("root_rank", root, 3, "ranks")


@pytest.mark.parametrize("root", [1.0, "1", None])
def test_a_root_is_a_whole_number(root: object) -> None:
    with pytest.raises(TypeError, match="not a whole number; name one of the ranks 0 to 2"):
        checked_root("root_rank", root, 3, "ranks")
