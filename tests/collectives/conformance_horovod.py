"""Additional statements about communicators over Horovod: its requests and its errors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
from conformance_checks import HEADLINE
from reference import LARGE, Reduced, contribution, contributions
from statements import LIMITS, Suite, assert_all_reduced, assert_same_bits, texts_of_all_ranks
from watching import watched

import collectives
from collectives import (
    BrokenError,
    BusyError,
    CollectiveTimeoutError,
    Communicator,
    LayoutMismatchError,
    Limits,
    Settings,
    load_backend,
)
from collectives.clock import FakeClock
from collectives.factory import RankGroup
from collectives.waiting import Watch

suite = Suite()

TENSORS = 40
BEGINNINGS = ("allgather_async", "broadcast_async_", "grouped_allreduce_async_")


def _backend() -> ModuleType:
    return load_backend("horovod")


@suite.add
def the_mechanism_is_horovod_and_subgroups_use_mpi(communicator: Communicator) -> None:
    assert communicator.mechanism == "horovod"
    with communicator.subgroup(range(communicator.size)) as group:
        assert group.mechanism in ("window", "ring")


# ---- the number of requests


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the started operations by name; Horovod negotiates each of them."""
    counts: Counter[str] = Counter()
    hvd = _backend().hvd

    def counting(name: str, begin: Callable[..., int]) -> Callable[..., int]:
        def begin_and_count(*arguments: object, **options: object) -> int:
            counts[name] += 1
            return begin(*arguments, **options)

        return begin_and_count

    with pytest.MonkeyPatch.context() as patch:
        for name in BEGINNINGS:
            patch.setattr(hvd, name, counting(name, getattr(hvd, name)))
        yield counts


@suite.add_for_each(("sum", "mean"))
def a_group_of_many_tensors_costs_one_comparison_and_one_reduction(communicator: Communicator, op: str) -> None:
    arrays = [np.ones(2000 + number, np.float32) for number in range(TENSORS)]
    names = [f"gradient {number}" for number in range(TENSORS)]
    with counted() as of_group:
        communicator.grouped_ordered_all_reduce([[array] for array in arrays], arrays, op, names=names)
    with counted() as of_single_calls:
        for array, name in zip(arrays, names, strict=True):
            communicator.ordered_all_reduce([array], array, op, name=name)
    assert of_group == {"allgather_async": 1, "grouped_allreduce_async_": 1}
    assert of_single_calls == {"allgather_async": TENSORS, "grouped_allreduce_async_": TENSORS}


@suite.add
def a_small_tensor_travels_with_the_comparison(communicator: Communicator) -> None:
    with counted() as counts:
        communicator.ordered_all_reduce([np.ones(7), np.ones(7)], op="mean")
        communicator.all_gather(np.ones(7))
        communicator.broadcast(np.ones(7))
        communicator.barrier()
    assert counts == {"allgather_async": 4}


@suite.add
def a_large_tensor_is_broadcast_by_horovod(communicator: Communicator) -> None:
    with counted() as counts:
        communicator.broadcast(np.ones(LARGE))
    assert counts == {"allgather_async": 1, "broadcast_async_": 1}


@suite.add
def arrays_too_long_for_mpi_travel_in_pieces(communicator: Communicator) -> None:
    """Lower the limits of MPI's counters to a few thousand."""
    backend, size, rank = _backend(), communicator.size, communicator.rank
    arrays = contributions("float32", 70_001, range(size))
    with pytest.MonkeyPatch.context() as patch, counted() as counts:
        patch.setattr(backend, "_PIECE_BYTES", 100_000)
        patch.setattr(backend, "_GATHERED_BYTES", 100_000)
        for op in ("sum", "max"):
            buffer = arrays[rank].copy()
            assert_all_reduced(communicator, communicator.all_reduce(buffer, op), Reduced(arrays, op), op)
        assert_same_bits(communicator.all_gather(arrays[rank]), np.stack(arrays))
        assert_same_bits(communicator.broadcast(arrays[rank].copy(), size - 1), arrays[-1])
    assert counts["grouped_allreduce_async_"] == 1
    assert counts["broadcast_async_"] == 3
    assert counts["allgather_async"] >= 4 + 2 * 3 * size


# ---- tensors and arrays


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "float32": lambda: np.arange(7, dtype=np.float32),
    "int64": lambda: np.arange(7),
    "uint8": lambda: np.arange(7, dtype=np.uint8),
    "empty": lambda: np.empty(0, np.float64),
    "a part": lambda: np.arange(100, dtype=np.float64)[13:57],
    "read-only": lambda: _read_only(np.arange(7, dtype=np.float32)),
    "read-only and empty": lambda: _read_only(np.empty(0, np.int32)),
    "bytes": lambda: np.frombuffer(b"fingerprint", np.uint8),
}


@suite.add_for_each(tuple(ARRAYS))
def a_tensor_is_the_memory_of_its_array(communicator: Communicator, kind: str) -> None:
    """Make an error of any warning."""
    array = ARRAYS[kind]()
    tensor = _backend().tensor_of(array)
    assert_same_bits(tensor.numpy(), array)
    if array.size:
        assert tensor.data_ptr() == array.__array_interface__["data"][0]
    if array.size and array.flags.writeable:
        array[-1] = 99
        assert tensor[-1] == 99


@suite.add_for_each(("float32", "read-only"))
def memory_lives_as_long_as_its_tensor(communicator: Communicator, kind: str) -> None:
    """Horovod may hold a tensor after a wait for it has ended with an error."""
    array = ARRAYS[kind]()
    alive = weakref.ref(array)
    tensor = _backend().tensor_of(array)
    del array
    assert alive() is not None
    assert tensor[-1] == 6


@suite.add
def a_large_result_is_reduced_where_it_belongs(communicator: Communicator) -> None:
    """Horovod reads from and writes to the caller's array."""
    hvd, seen = _backend().hvd, []
    begin = hvd.grouped_allreduce_async_

    def note(tensors: list, **options: object) -> int:
        seen.extend(tensor.data_ptr() for tensor in tensors)
        return begin(tensors, **options)

    buffer = contribution("float32", LARGE, communicator.rank).copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "grouped_allreduce_async_", note)
        communicator.all_reduce(buffer, "mean")
    assert seen == [buffer.__array_interface__["data"][0]]


# ---- errors of Horovod


def _watch(communicator: Communicator) -> Watch:
    ranks = range(communicator.size)
    return RankGroup(communicator.rank, [f"rank {rank}" for rank in ranks], ranks).watch(Settings(limits=LIMITS))


@suite.add_for_each(("shapes", "dtypes", "roots"), at_least=2)
def a_mismatch_found_by_horovod_becomes_a_layout_mismatch(communicator: Communicator, case: str) -> None:
    backend = _backend()
    is_odd = communicator.rank == 0
    tensor = backend.tensor_of(
        np.ones(8 if is_odd and case == "shapes" else 7, "f8" if is_odd and case == "dtypes" else "f4")
    )
    root = 1 if is_odd and case == "roots" else 0
    with pytest.raises(LayoutMismatchError, match=f"{HEADLINE}: Horovod says: .*ismatched"):
        backend.finished(lambda: backend.hvd.broadcast_async_(tensor, root, name="own"), _watch(communicator))
    assert (communicator.all_reduce(np.ones(70_001)) == communicator.size).all()


@suite.add_for_groups
def a_name_in_use_is_refused_as_busy(communicator: Communicator) -> None:
    backend, watch = _backend(), _watch(communicator)

    def begin() -> int:
        handle: int = backend.hvd.allreduce_async_(backend.tensor_of(array), op=backend.hvd.Sum, name="twice")
        return handle

    array = np.ones(7)
    if communicator.rank == 0:
        handle = begin()
        with pytest.raises(BusyError, match="Horovod says: .*give each concurrent operation its own name"):
            backend.finished(begin, watch)
    communicator.barrier()
    backend.finished(begin if communicator.rank else lambda: handle, watch)
    assert array.tolist() == [communicator.size] * 7


@suite.add_for_groups
def a_group_of_fewer_tensors_fails_on_all_ranks(communicator: Communicator) -> None:
    count = 2 if communicator.rank == 0 else 3
    arrays = [np.full(70_001, number, np.float32) for number in range(count)]
    names = ["kernel", "bias", "scale"][:count]
    with pytest.raises(LayoutMismatchError, match=HEADLINE) as caught:
        communicator.grouped_ordered_all_reduce([[array] for array in arrays], arrays, names=names)
    text = str(caught.value)
    assert texts_of_all_ranks(communicator, text) == [text] * communicator.size
    assert "rank 0 called grouped_ordered_all_reduce 'kernel, bias' (" in text
    assert "called grouped_ordered_all_reduce 'kernel, bias, scale' (" in text
    assert all((array == number).all() for number, array in enumerate(arrays))


# ---- absent ranks


@suite.add_for_groups
def an_absent_rank_is_warned_about_and_given_up(communicator: Communicator) -> None:
    """Only Horovod's coordinator knows the absent rank, so messages name all other ranks."""
    late = communicator.size - 1
    clock = FakeClock(tick_s=1e-5)
    group = collectives.connect("horovod", Settings(limits=Limits(clock=clock)))
    if communicator.rank != late:
        clock.tick_s = 10.0
        with watched() as warnings, pytest.raises(CollectiveTimeoutError) as caught:
            group.all_reduce(np.ones(70_001), name="weights")
        for text in (*warnings.texts[:1], str(caught.value)):
            assert text.startswith(f"rank {communicator.rank} on "), text
            assert f" rank {late} on " in text, text
            assert "in all_reduce 'weights' (collective 1)" in text, text
        assert len(warnings.texts) > 1
        assert "gave up after timeout_s = 600" in str(caught.value)
        with pytest.raises(BrokenError, match="all_reduce 'weights'.* failed before"):
            group.barrier()
        with pytest.raises(BrokenError):
            group.start_all_reduce(np.ones(3), name="later")
    communicator.barrier()
    group.abandon()


@suite.add_for_groups
def a_started_collective_that_a_rank_never_starts_is_given_up(communicator: Communicator) -> None:
    late = communicator.size - 1
    clock = FakeClock(tick_s=1e-5)
    group = collectives.connect("horovod", Settings(limits=Limits(clock=clock)))
    if communicator.rank != late:
        clock.tick_s = 10.0
        handle = group.start_all_reduce(np.ones(7), name="bucket")
        with pytest.raises(CollectiveTimeoutError, match="in all_reduce 'bucket'.* gave up after timeout_s = 600"):
            handle.wait()
    communicator.barrier()
    group.abandon()
