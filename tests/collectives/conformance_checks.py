"""Statements about every communicator whose ranks make different calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from reference import LARGE
from statements import About, Suite, assert_same_bits, texts_of_all_ranks, twin_of

from collectives import Communicator, LayoutMismatchError

suite = Suite()

HEADLINE = "Tensor layouts did not match on all instances"


def _filled(shape: int | tuple[int, ...], dtype: object = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


Calls = Callable[[Communicator, np.ndarray], object]


@dataclass(frozen=True)
class Conflict:
    """The call of most ranks and a different call of one rank, with the words that messages use for each."""

    call: Calls
    buffer: np.ndarray
    words: tuple[str, ...]
    odd_call: Calls
    odd_buffer: np.ndarray
    odd_words: tuple[str, ...]


def _all_reduce(name: str, op: str = "sum") -> Calls:
    return lambda c, buffer: c.all_reduce(buffer, op, name=name)


def _ordered(name: str) -> Calls:
    return lambda c, buffer: c.ordered_all_reduce([buffer, buffer], name=name)


def _broadcast(name: str, root: int = 0) -> Calls:
    return lambda c, buffer: c.broadcast(buffer, root, name=name)


def _all_gather(name: str) -> Calls:
    return lambda c, buffer: c.all_gather(buffer, name=name)


def _gather(name: str, root: int) -> Calls:
    return lambda c, buffer: c.gather(buffer, root, name=name)


def _barrier(name: str) -> Calls:
    return lambda c, _: c.barrier(name=name)


def _resized(one: int, other: int) -> Conflict:
    return Conflict(
        _all_reduce("weights"), _filled(one), (f"float32[{one}]",),
        _all_reduce("weights"), _filled(other), (f"float32[{other}]",),
    )  # fmt: skip


CONFLICTS = {
    "two tensors of equal shape": Conflict(
        _all_reduce("weights"), _filled(7), ("'weights'",),
        _all_reduce("bias"), _filled(7), ("'bias'",),
    ),
    "resized": _resized(7, 8),
    "resized from one to many": _resized(1, LARGE),
    "resized from many to one": _resized(LARGE, 1),
    "resized from many to some": _resized(LARGE, 40_000),
    "one of two large sizes": _resized(LARGE, LARGE + 1),
    "resized to nothing": _resized(7, 0),
    "reshaped": Conflict(
        _all_reduce("weights"), _filled((2, 3)), ("float32[2,3]",),
        _all_reduce("weights"), _filled((3, 2)), ("float32[3,2]",),
    ),
    "scalar and vector": Conflict(
        _all_gather("x"), _filled(()), ("float32[]",),
        _all_gather("x"), _filled((1, 1)), ("float32[1,1]",),
    ),
    "retyped": Conflict(
        _all_reduce("weights"), _filled(7), ("float32[7]",),
        _all_reduce("weights"), _filled(7, np.int32), ("int32[7]",),
    ),
    "retyped and large": Conflict(
        _ordered("weights"), _filled(LARGE), ("float32",),
        _ordered("weights"), _filled(LARGE, np.float64), ("float64",),
    ),
    "another op": Conflict(
        _all_reduce("weights"), _filled(7), ("sum",),
        _all_reduce("weights", "max"), _filled(7), ("max",),
    ),
    "another root": Conflict(
        _broadcast("weights"), _filled(7), ("root 0",),
        _broadcast("weights", 1), _filled(7), ("root 1",),
    ),
    "another root of a gather": Conflict(
        _gather("outputs", 0), _filled(LARGE), ("root 0",),
        _gather("outputs", 1), _filled(LARGE), ("root 1",),
    ),
    "another operation": Conflict(
        _all_reduce("weights"), _filled(7), ("all_reduce 'weights'",),
        _broadcast("weights"), _filled(7), ("broadcast 'weights'",),
    ),
    "ordered and not": Conflict(
        _all_reduce("weights"), _filled(7), ("called all_reduce",),
        _ordered("weights"), _filled(7), ("called ordered_all_reduce",),
    ),
    "a barrier instead": Conflict(
        _all_reduce("weights"), _filled(LARGE), ("all_reduce 'weights'",),
        _barrier("end of epoch"), _filled(1), ("barrier 'end of epoch'",),
    ),
    "an allocation of another size": Conflict(
        lambda c, _: c.allocate((5,), np.float32), _filled(1), ("allocate", "float32[5]"),
        lambda c, _: c.allocate((6,), np.float32), _filled(1), ("float32[6]",),
    ),
}  # fmt: skip


@contextmanager
def _raises_on_all_ranks(communicator: Communicator, *words: str) -> Iterator[None]:
    """Assert that the block fails on every rank with the same text and leaves the communicator usable."""
    with pytest.raises(LayoutMismatchError, match=HEADLINE) as caught:
        yield
    text = str(caught.value)
    texts = texts_of_all_ranks(communicator, text)
    assert texts == [text] * communicator.size
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in {text!r}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} called"
    return f"ranks {ranks[0]}-{ranks[-1]} called"


@suite.add_for_each(tuple(CONFLICTS), at_least=2, about=About.CALLS)
def different_calls_fail_on_all_ranks(communicator: Communicator, case: str) -> None:
    conflict = CONFLICTS[case]
    for odd in {0, communicator.size - 1}:
        others = [rank for rank in range(communicator.size) if rank != odd]
        is_odd = communicator.rank == odd
        call, original = (conflict.odd_call, conflict.odd_buffer) if is_odd else (conflict.call, conflict.buffer)
        buffer = original.copy()
        words = (*conflict.words, *conflict.odd_words, _ranks([odd]), _ranks(others))
        with _raises_on_all_ranks(communicator, *words):
            call(communicator, buffer)
        assert_same_bits(buffer, original)
        total = communicator.all_reduce(np.full(3001, communicator.rank, np.int32))
        assert (total == sum(range(communicator.size))).all()


@suite.add_for_groups
def two_swapped_tensors_of_equal_shape_fail_on_all_ranks(communicator: Communicator) -> None:
    for length in (7, LARGE):
        last = communicator.size - 1
        names = ("kernel", "moment") if communicator.rank < last else ("moment", "kernel")
        tensors = {name: np.full(length, number, np.float32) for number, name in enumerate(("kernel", "moment"))}
        for name in names:
            with _raises_on_all_ranks(communicator, "'kernel'", "'moment'", f"rank {last} called"):
                communicator.all_reduce(tensors[name], name=name)
        assert (tensors["kernel"] == 0).all()
        assert (tensors["moment"] == 1).all()


@suite.add_for_groups
def a_skipped_call_fails_on_all_ranks(communicator: Communicator) -> None:
    last = communicator.size - 1
    names = ("a", "b", "c") if communicator.rank < last else ("a", "c")
    communicator.all_reduce(_filled(7), name=names[0])
    with _raises_on_all_ranks(communicator, "'b'", "'c'", f"rank {last} called"):
        communicator.all_reduce(_filled(7), name=names[1])
    communicator.all_reduce(_filled(7), name="c")


@suite.add_for_groups
def a_doubled_call_fails_on_all_ranks(communicator: Communicator) -> None:
    names = ("a", "b") if communicator.rank else ("a", "a")
    communicator.all_reduce(_filled(7), name=names[0])
    with _raises_on_all_ranks(communicator, "'a'", "'b'", "rank 0 called"):
        communicator.all_reduce(_filled(7), name=names[1])


@suite.add_for_groups
def different_calls_on_all_ranks_are_named_with_their_ranks(communicator: Communicator) -> None:
    parts = [f"rank {rank} called all_reduce 'tensor{rank}'" for rank in range(communicator.size)]
    with _raises_on_all_ranks(communicator, *parts):
        communicator.all_reduce(_filled(7), name=f"tensor{communicator.rank}")


@suite.add_for_groups
def names_of_any_length_and_script_are_shown(communicator: Communicator) -> None:
    name = "größe/層" + "x" * 700 + str(communicator.rank)
    with _raises_on_all_ranks(communicator, name, "0'", "1'"):
        communicator.barrier(name=name)


@suite.add_for_groups
def many_failures_leave_the_ranks_in_step(communicator: Communicator) -> None:
    for turn in range(10):
        with pytest.raises(LayoutMismatchError):
            communicator.all_reduce(_filled(5 + communicator.rank), name=f"turn {turn}")
        assert (communicator.all_reduce(_filled(70_001)) == communicator.size).all()


@suite.add_for_groups
def a_skipped_last_call_is_noticed_when_the_rank_closes(communicator: Communicator) -> None:
    last = communicator.size - 1
    group = twin_of(communicator)
    buffer = _filled(7)
    with _raises_on_all_ranks(communicator, "all_reduce 'final'", "close", f"rank {last} called close"):
        if communicator.rank == last:
            group.close()
        else:
            group.all_reduce(buffer, name="final")
    group.abandon()
    assert (buffer == 1).all()


@suite.add_for_groups
def ranks_may_contribute_different_numbers_of_arrays(communicator: Communicator) -> None:
    for length in (7, LARGE):
        arrays = [_filled(length)] * (1 + communicator.rank)
        result = communicator.ordered_all_reduce(arrays)
        assert (result == sum(range(communicator.size + 1))).all()
